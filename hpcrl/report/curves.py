"""Section `curves`: every metric against the step, with the steps at which attempts began."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

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
    names = list(dict.fromkeys(name for row in run.rows for name in row if name != "step"))
    if not names:
        return None
    kept = sorted(names, key=lambda name: name not in DEFAULTS)[:MAX_METRICS]
    grids: dict[tuple[int, ...], int] = {}
    curves = {}
    for name in sorted(kept):
        steps, values = thinned(points(run.rows, name), MAX_POINTS)
        curves[name] = [grids.setdefault(tuple(steps), len(grids)), values]
    data = {
        "defaults": [name for name in DEFAULTS if name in curves],
        "grids": [list(steps) for steps in grids],
        "curves": curves,
        "left_out": len(names) - len(kept),
        "steps": len(run.rows),
        "max_points": MAX_POINTS,
        "attempts": [[each.number, each.resumed_from] for each in histories(run) if each.resumed_from is not None],
    }
    return ReportSection("curves", "Curves", data, "curves.js")


def points(rows: Iterable[Mapping[str, Any]], name: str) -> list[tuple[int, float | None]]:
    """(step, value) of each row with this metric; None for a value that was not finite."""
    return [(row["step"], _rounded(row[name])) for row in rows if name in row]


def thinned(curve: Sequence[tuple[int, float | None]], most: int) -> tuple[list[int], list[float | None]]:
    """(steps, values) of at most `most` points. The curve is cut into most / 2 parts of equally many points, and the
    smallest and the largest value of each part are kept, so no extreme is lost; parts without a finite value keep a
    gap. The first and the last point are among the points of the first and the last part only if they are extremes."""
    if len(curve) > most:
        parts = max(most // 2, 1)
        bounds = [number * len(curve) // parts for number in range(parts + 1)]
        curve = [point for begin, end in pairwise(bounds) for point in _extremes(curve[begin:end])]
    return [step for step, _ in curve], [value for _, value in curve]


def _extremes(part: Sequence[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    finite = [(value, step) for step, value in part if value is not None]
    if not finite:
        return [part[0]]
    low, high = min(finite), max(finite)
    return [(step, value) for value, step in sorted({low, high}, key=lambda each: each[1])]


def _rounded(value: Any) -> float | None:
    """Six significant digits, which a chart cannot show either."""
    try:
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
    except OverflowError:  # a damaged line: an integer larger than every float
        return None
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
