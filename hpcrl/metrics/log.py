"""Metrics of a run: metrics.jsonl, trackers and the progress display, fed by one call per step."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.metrics.progress import Progress
from hpcrl.metrics.trackers.thread import TrackerCall, TrackerThread, log_missed
from hpcrl.system.files import naming
from hpcrl.system.log import BARE

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"

RENAMED = {
    # until 0.6
    "actor/correction_cut": "actor/correction_clipfrac",
    "judge/told_to_wait": "judge/refused",
    "reward_model/told_to_wait": "reward_model/refused",
    "scheduler/stale": "scheduler/late_events",
    "time/step_hand_over": "time/step_rollout_transfer",
    "time/step_model_update": "time/step_update_weights",
    **{f"scheduler/version_lag/{part}": f"scheduler/staleness/{part}" for part in ("mean", "max", "min")},
}
"""Metric of an earlier version -> its name now."""
_OF_DOMAIN = re.compile(r"(?!(domain|val|env|system)/).+/(score$|(actor|critic|group|token)/)")
"""Metrics of a domain in earlier versions, now below `domain/`."""


class MetricsLog:
    """The controller's log of a run, starting after `resume_step` (-1: no checkpoint). ValueError if an earlier
    attempt's rows past this step were not moved away before (checkpoint/lineage.py)."""

    def __init__(
        self,
        run_dir: Path,
        resume_step: int,
        max_steps: int,
        eval_every: int = 0,
        trackers: Callable[[], Sequence[TrackerThread]] = tuple,
    ):
        """`trackers` starts the trackers, to which rows of earlier attempts that they lack are then logged."""
        logged = read_metrics(run_dir)
        if logged and logged[-1]["step"] > resume_step:
            last = logged[-1]["step"]
            raise ValueError(f"{run_dir / METRICS} ends with step {last}, past the resumed step {resume_step}")
        self._trackers = trackers()
        log_missed(self._trackers, logged)
        self._path = run_dir / METRICS
        self._file = open(self._path, "ab")  # noqa: SIM115
        self._step = resume_step
        self._progress = Progress(max(resume_step, 0), max_steps, sys.stdout, eval_every=eval_every)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step; steps are ascending. The row is on disk when this returns; OSError names a file that cannot be
        written. Non-finite values become null in metrics.jsonl, do not go to trackers, and are reported to the user."""
        assert step > self._step, f"step {step} is logged after step {self._step}"
        assert "step" not in metrics
        self._step = step
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        row = {"step": step} | {name: finite.get(name) for name in values}
        with naming(self._path):
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        for tracker in self._trackers:
            tracker.log(step, finite)
        self._progress.update(step, finite)
        if len(finite) < len(values):
            odd = ", ".join(f"{name} = {value}" for name, value in values.items() if name not in finite)
            logger.warning("step %d: not finite: %s", step, odd, extra=BARE)

    def end_progress(self) -> None:
        """End a terminal's progress bar, so later output is below it (idempotent)."""
        self._progress.close()

    def call_trackers(self, call: TrackerCall) -> None:
        """Queue a call for every tracker."""
        for tracker in self._trackers:
            tracker.put(call)

    def close(self, within_s: float = math.inf) -> list[str]:
        """Close the log within this many seconds; returns the commands that upload what trackers kept on disk."""
        self.end_progress()
        with contextlib.suppress(OSError):  # from a row that log() could not write
            self._file.close()
        trackers, self._trackers = self._trackers, ()
        ends = time.monotonic() + within_s
        for tracker in trackers:
            tracker.finish()
        return [hint for tracker in trackers if (hint := tracker.close(max(0.0, ends - time.monotonic())))]


def read_metrics(run_dir: Path, max_bytes: int | None = None) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, None for non-finite values; empty without a file. Metrics of earlier versions have their
    new names. With `max_bytes`, only the newest rows, of which there may be so many bytes.

    Lines without a step and truncated lines, left by a kill or by a superseded attempt, are skipped; the next resume
    moves them away.
    """
    path = run_dir / METRICS
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(start := max(size - max_bytes, 0) if max_bytes is not None else 0)
        if start:
            file.readline()  # the rest of a row
        return [row for row in map(_row, file) if row is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
        if line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int):
            return {name_now(name): value for name, value in row.items()}
    return None


@functools.cache
def name_now(name: str) -> str:
    """A metric's name in this version."""
    return f"domain/{name}" if _OF_DOMAIN.match(name) else RENAMED.get(name, name)
