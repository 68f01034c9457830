"""What trainer.freeze names: parts of a model, or patterns over the names of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pydantic_core import PydanticCustomError

TOWER_PARTS = ("vision", "merger")
PARTS = (*TOWER_PARTS, "embeddings", "router")
EXAMPLE = "model.layers.[0-3].*"


def freezable(entry: Any) -> Any:
    """An entry that is a part, or a pattern; other words raise an error."""
    if isinstance(entry, str) and entry not in PARTS and not set(entry) & set(".*"):
        expected = f"{', '.join(PARTS)} or a pattern of parameter names as {EXAMPLE}"
        raise PydanticCustomError("unknown_part", "expected {expected}", {"expected": expected})
    return entry


def frozen(entries: Sequence[str], parts: Mapping[str, str], family: str) -> set[str]:
    """The names that the entries select. `parts` maps each parameter's name to its part, or to another word. ValueError
    if an entry selects no parameter, or all entries together select every parameter."""
    found: set[str] = set()
    for entry in entries:
        is_part = entry in PARTS
        own = {name for name, part in parts.items() if (part == entry if is_part else fnmatchcase(name, entry))}
        if not own and is_part:
            raise ValueError(f"trainer.freeze: {family} has no part {entry}; leave it out")
        if not own:
            last = list(parts)[-1]
            raise ValueError(f"trainer.freeze: {family} has no parameter named {entry}; its last one is {last}")
        found |= own
    if found and len(found) == len(parts):
        raise ValueError(f"trainer.freeze: {', '.join(entries)} is all of {family}; leave something to train")
    return found
