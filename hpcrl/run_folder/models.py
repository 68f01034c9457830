"""Checks that the folders of a run's models still hold the models with which it began, by their config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config import ConfigError
from hpcrl.run_folder.changes import differences

SECTIONS = ("model", "reference", "teacher", "critic", "judge", "reward_model")
"""Sections with a key `path`."""
OF_THE_WRITER = ("transformers_version", "_name_or_path")
"""Keys of config.json that identify its writer."""
MAX_SHOWN = 4


def models_of(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Key (such as model.path) -> config.json, for each model given as a folder whose config.json is readable."""
    found = {}
    for section in SECTIONS:
        if path := (config.get(section) or {}).get("path"):
            try:
                content = json.loads((Path(path) / "config.json").read_text())
            except (OSError, ValueError, RecursionError):
                continue  # reported where the model is read
            if isinstance(content, dict):
                found[f"{section}.path"] = {key: content[key] for key in content if key not in OF_THE_WRITER}
    return found


def check_models(config: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> None:
    """ConfigError if a folder holds another model than at the first attempt that could read it."""
    now, lines = models_of(config), []
    for key, content in now.items():
        first = next((then[key] for attempt in attempts if key in (then := attempt.get("models", {}))), content)
        if changed := [line for _, line in differences(first, content)]:
            folder = config[key.removesuffix(".path")]["path"]
            more = f", and {len(changed) - MAX_SHOWN} more" if len(changed) > MAX_SHOWN else ""
            shown = ", ".join(changed[:MAX_SHOWN]) + more
            lines.append(f"{key}: {folder}/config.json is of another model than when the run began ({shown})")
    if lines:
        lines[-1] += "; put that model back, or use another run_name or resume=fresh"
        raise ConfigError(lines)
