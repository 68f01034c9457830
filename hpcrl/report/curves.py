"""Section `curves`: every metric against the step, with the steps at which attempts began."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hpcrl.metrics.metric_table import MetricColumn
from hpcrl.report.attempt_history import histories
from hpcrl.report.run_files import RunFiles
from hpcrl.report.section import ReportSection

DEFAULTS = (
    "critic/rewards/mean",
    "sft/loss",
    "rm/loss",
    "loss",
    "rewards/accuracies",
    "rewards/margins",
    "val/rewards/accuracies",
    "val/score/mean",
    "val/accuracy",
    "critic/entropy/mean",
    "critic/kl",
    "distill/reverse_kl",
    "distill/divergence",
    "token/response_length/mean",
    "mismatch/kl_k3",
    "time/step_total",
    "time/step_generate",
    "time/step_train",
)
"""Metrics that are shown at first, where the run has them."""
MAX_POINTS = 1000
"""Maximum points of a curve; of a longer one the extremes of each of MAX_POINTS / 2 equal parts are kept."""
MAX_METRICS = 800


def section(run: RunFiles) -> ReportSection | None:
    """None for a run without metrics."""
    names = run.metrics.names()
    if not names:
        return None
    kept = sorted(names, key=lambda name: name not in DEFAULTS)[:MAX_METRICS]
    grids: dict[tuple[int, ...], int] = {}
    curves = {}
    for name in sorted(kept):
        steps, values = thinned(run.metrics.column(name), MAX_POINTS)
        curves[name] = [grids.setdefault(tuple(steps), len(grids)), values]
    data = {
        "defaults": [name for name in DEFAULTS if name in curves],
        "grids": [list(steps) for steps in grids],
        "curves": curves,
        "left_out": len(names) - len(kept),
        "steps": len(run.metrics),
        "max_points": MAX_POINTS,
        "attempts": [[each.number, each.resumed_from] for each in histories(run) if each.resumed_from is not None],
    }
    return ReportSection("curves", "Curves", data, "curves.js")


def thinned(column: MetricColumn, most: int) -> tuple[list[int], list[float | None]]:
    """(steps, values) of at most `most` points, None for a value that was not finite. The curve is cut into most / 2
    parts of equally many points, and the smallest and the largest value of each part are kept, so no extreme is lost;
    parts without a finite value keep a gap. The first and the last point are among the points of the first and the last
    part only if they are extremes."""
    values, kept = column.values, list(range(len(column.values)))
    if len(kept) > most:
        parts = max(most // 2, 1)
        bounds = [number * len(kept) // parts for number in range(parts + 1)]
        kept = [place for begin, end in pairwise(bounds) for place in _extremes(values, begin, end)]
    return column.steps[kept].tolist(), [_rounded(value) for value in values[kept].tolist()]


def _extremes(values: NDArray[np.float64], begin: int, end: int) -> list[int]:
    """The places of the smallest and the largest of values[begin:end]: of equal ones the first and the last."""
    part = values[begin:end]
    finite = np.isfinite(part)
    if not finite.any():
        return [begin]
    low = begin + int(np.where(finite, part, math.inf).argmin())
    high = end - 1 - int(np.where(finite, part, -math.inf)[::-1].argmax())
    return sorted({low, high})


def _rounded(value: float) -> float | None:
    """Six significant digits, since a chart cannot show more."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
