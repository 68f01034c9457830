"""The controller's state in a checkpoint: one small JSON file, with its SHA-256 in the manifest like every other file.

Each section is a dict that one object writes and reads (state_dict / load_state_dict): the data cursor with the prompt
ledger, the rollout scheduler, counters.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

FORMAT = 1
STATE = "state.json"
SECTIONS = ("cursor", "scheduler", "counters")


def encode_state(state: dict[str, Any]) -> bytes:
    """The content of state.json. Tuples are read back as lists, everything else unchanged. ValueError names a missing
    section, or an entry that JSON would change (non-finite numbers, keys that are not strings, arrays)."""
    _check_sections(state, STATE)
    _check_plain(state, "state")
    return json.dumps({"format": FORMAT, **state}, allow_nan=False, indent=1).encode()


def read_state(folder: Path) -> dict[str, Any]:
    """The sections of a checkpoint's state.json. ValueError if the file is missing, unreadable or of another format."""
    path = folder / STATE
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    found = state.pop("format", None) if isinstance(state, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} has format {found}, but this version reads {FORMAT}")
    _check_sections(state, path)
    return state


def _check_sections(state: dict[str, Any], path: Path | str) -> None:
    missing = [name for name in SECTIONS if name not in state]
    wrong = [name for name, section in state.items() if not isinstance(section, dict) or name == "format"]
    if missing or wrong:
        raise ValueError(f"{path}: missing sections {missing}, sections that are not dicts {wrong}")


def _check_plain(value: Any, place: str) -> None:
    if isinstance(value, dict):
        for key, entry in value.items():
            if type(key) is not str:
                raise ValueError(f"{place} has the key {key!r}, which JSON would turn into a string")
            _check_plain(entry, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            _check_plain(entry, f"{place}[{index}]")
    elif type(value) is float and not math.isfinite(value):
        raise ValueError(f"{place} is {value}, which JSON cannot hold")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise ValueError(f"{place} is a {type(value).__name__}, which JSON cannot hold")
