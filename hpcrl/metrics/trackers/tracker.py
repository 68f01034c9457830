"""The tracker protocol, and the description of a run that trackers get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker gets it at the start of an attempt.

    Args:
        id: Equal in all attempts.
        folder: The tracker's folder in the run folder.
        first_step: First step that will be logged.
        online: Whether the tracker may use the network.
        config: The configuration, as plain data.
        plan: The text that the launch printed; empty if the run folder has none.
    """

    name: str
    project: str
    id: str
    run_dir: Path
    folder: Path
    first_step: int
    online: bool
    config: Mapping[str, Any]
    plan: str


class Tracker(Protocol):
    """Created by the specification's `make(run, section)`, in the thread that calls all methods. Any method may raise
    or hang, which only ends the tracker, with a warning."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The finite metrics of a step; steps are ascending."""

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows with the same columns, such as sampled responses."""

    def image(self, name: str, path: Path) -> None:
        """A plot, as a PNG file."""

    def close(self) -> str:
        """End the attempt; returns the command that uploads data kept on disk, empty if there is nothing to upload."""


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The configuration as text by dotted key."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value)
    return found
