"""Metrics of a run: metrics.jsonl, TensorBoard and the progress display, fed by one call per step."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from hpcrl.files import naming
from hpcrl.metrics.progress import Progress

METRICS = "metrics.jsonl"


class MetricsLog:
    """The controller's log of a run, from the step after `resume_step` (-1: no checkpoint) on. ValueError if an earlier
    attempt's rows past this step were not moved away before (checkpoint/lineage.py)."""

    def __init__(
        self, run_dir: Path, resume_step: int, max_steps: int, eval_every: int = 0, stream: TextIO | None = None
    ):
        logged = [row["step"] for row in read_metrics(run_dir)]
        if logged and logged[-1] > resume_step:
            raise ValueError(f"{run_dir / METRICS} ends with step {logged[-1]}, past the resumed step {resume_step}")
        # SummaryWriter creates its folder, and its import takes a second: only done if something is logged.
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step + 1)
        self._path = run_dir / METRICS
        self._file = open(self._path, "ab")  # noqa: SIM115
        self._step = resume_step
        self._progress = Progress(max(resume_step, 0), max_steps, stream or sys.stdout, eval_every=eval_every)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step; steps are ascending. On disk when this returns; OSError names a file that is not. Non-finite
        values become null in metrics.jsonl, are omitted from TensorBoard, and are reported to the user."""
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
        with naming(self._path.with_name("tensorboard")):
            for name, value in finite.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()
        self._progress.update(step, finite)
        if len(finite) < len(values):
            odd = ", ".join(f"{name} = {value}" for name, value in values.items() if name not in finite)
            self.note(f"step {step}: not finite: {odd}")

    def note(self, text: str) -> None:
        """Print a permanent line for the user."""
        self._progress.note(text)

    def close(self) -> None:
        self._progress.close()
        self._board.close()
        self._file.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, None for non-finite values; empty without a file.

    Lines without a step and truncated lines, left by a kill or by a superseded attempt, are skipped; the next resume
    moves them away.
    """
    path = run_dir / METRICS
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return [row for row in map(_row, lines) if row is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        row = json.loads(line)
        if line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int):
            return row
    return None
