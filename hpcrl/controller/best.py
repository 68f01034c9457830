"""Which step's checkpoint is kept as the best by keep_best.metric."""

from __future__ import annotations

import difflib
import logging
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.checkpoint.best import Best, best_of, name_best, read_best, value_at
from hpcrl.config import Config
from hpcrl.system.files import steps_in

logger = logging.getLogger(__name__)

MAX_NAMED = 8
"""How many metrics a warning about an unknown metric names."""


class BestStep:
    """The best evaluation so far; `best` is None without one, or without keep_best.metric."""

    def __init__(self, config: Config, root: Path):
        """`root` is the folder of the run's checkpoints."""
        self._metric, self._mode, self._root = config.keep_best.metric, config.keep_best.mode, root
        self.best: Best | None = None
        self._warned = False

    def judge(self, step: int, metrics: Mapping[str, float], evaluated: bool) -> None:
        """Take a step's metrics. Warns once if the step was `evaluated` without the metric."""
        if self._metric is None:
            return
        found = value_at(step, metrics, self._metric, self._mode)
        if found is not None and found.beats(self.best):
            self.best = found
        if evaluated and self._metric not in metrics and not self._warned:
            self._warned = True
            logger.warning("%s", _unknown(self._metric, sorted(name for name in metrics if name.startswith("val/"))))

    def is_at(self, step: int) -> bool:
        """Whether the best evaluation so far is this step's."""
        return self.best is not None and self.best.step == step

    def restore(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Find the best of the checkpoints that exist, by the rows of metrics.jsonl, which end with the restored step;
        a step that lacks its row, but is named in BEST, counts as well. BEST is then up to date."""
        self.best = self._best_of(rows, steps_in(self._root))
        if self._root.is_dir():
            name_best(self._root, self.best)

    def kept_steps(self) -> set[int]:
        """The steps of the best evaluation and of the checkpoint that BEST names, which may be an earlier one."""
        named = _named(self._root, self._metric, self._mode) if self._metric is not None else None
        return {best.step for best in (self.best, named) if best is not None}

    def forget(self, step: int, rows: Sequence[Mapping[str, Any]], now: int) -> None:
        """Find the best again after the save of its step has failed: of the checkpoints that exist and of step `now`,
        which may still be saved."""
        self.best = self._best_of(rows, {*steps_in(self._root), now} - {step})

    def _best_of(self, rows: Sequence[Mapping[str, Any]], steps: Collection[int]) -> Best | None:
        if self._metric is None:
            return None
        named = _named(self._root, self._metric, self._mode)
        logged = {row["step"] for row in rows}
        extra = [{"step": named.step, self._metric: named.value}] if named and named.step not in logged else []
        ordered = sorted([*rows, *extra], key=lambda row: row["step"])
        return best_of(ordered, self._metric, self._mode, steps)


def best_line(best: Best, run_dir: Path) -> str:
    """The best checkpoint for the user, and how to export it."""
    command = f"python -m hpcrl.convert --checkpoint {shlex.quote(str(run_dir))} --step best --output FOLDER"
    return f"step {best.step}, {best.metric} {best.value:.4g}; in HF layout with {command}"


def _named(root: Path, metric: str, mode: str) -> Best | None:
    """What BEST says, if it is about this metric."""
    try:
        named = read_best(root)
    except ValueError as error:
        logger.warning("%s; the best checkpoint is determined again from metrics.jsonl", error)
        return None
    return named if named is not None and (named.metric, named.mode) == (metric, mode) else None


def _unknown(metric: str, present: Sequence[str]) -> str:
    near = difflib.get_close_matches(metric, present, MAX_NAMED, 0.0)
    shown = ", ".join(near) + (", ..." if len(near) < len(present) else "")
    return (
        f"keep_best.metric: this evaluation has no {metric}, so no checkpoint is kept as the best; it has "
        f"{shown or 'no metric that begins with val/'}"
    )
