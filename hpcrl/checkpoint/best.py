"""The best checkpoint by a validation metric, named in checkpoints/BEST. A commit never deletes the checkpoint that it
names (commit.py)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from hpcrl.system.files import step_name, write_durably

BEST = "BEST"
"""The name of the file: JSON with step, metric, mode and value."""
BestMode = Literal["max", "min"]


class Best(msgspec.Struct, frozen=True):
    """The best value of a metric, and its step."""

    step: int
    metric: str
    mode: BestMode
    value: float

    def beats(self, other: Best | None) -> bool:
        """Whether this value is strictly better than another of the same metric, so ties keep the earlier."""
        if other is None:
            return True
        return self.value > other.value if self.mode == "max" else self.value < other.value


def value_at(step: int, metrics: Mapping[str, Any], metric: str, mode: BestMode) -> Best | None:
    """The metric's value in a step's metrics; None if there is none or it is not finite. The evaluation before the
    first step (0) has no checkpoint, so it has none either."""
    value = metrics.get(metric)
    if step <= 0 or isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return Best(step, metric, mode, float(value))


def best_of(rows: Iterable[Mapping[str, Any]], metric: str, mode: BestMode, steps: Collection[int]) -> Best | None:
    """The best value in rows of metrics.jsonl, in their order, among the steps whose checkpoints exist."""
    best: Best | None = None
    for row in rows:
        found = value_at(row["step"], row, metric, mode)
        if found is not None and found.step in steps and found.beats(best):
            best = found
    return best


def read_best(root: Path) -> Best | None:
    """What checkpoints/BEST says; None without the file. ValueError if it cannot be read."""
    path = root / BEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=Best)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def name_best(root: Path, best: Best | None) -> None:
    """Replace BEST, or remove it. Does nothing if BEST would name a step without a checkpoint."""
    if best is None:
        (root / BEST).unlink(missing_ok=True)
    elif (root / step_name(best.step)).is_dir():
        write_durably(root / BEST, msgspec.json.encode(best) + b"\n")
