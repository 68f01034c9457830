"""Curves: all metrics, thinned without losing extremes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from hpcrl.metrics.metric_table import MetricColumn, MetricTable
from hpcrl.report.curves import MAX_POINTS, section, thinned
from hpcrl.report.run_files import RunFiles
from tests.report.synthetic import METRICS_OF_A_STEP, write_run


def column(values: Sequence[float | None]) -> MetricColumn:
    """Of steps 1, 2, ..."""
    return MetricTable.of({"step": step, "x": value} for step, value in enumerate(values, 1)).column("x")


def test_thinned_keeps_every_extreme() -> None:
    rng = random.Random(0)
    curve = [float(rng.randrange(-1000, 1000)) for _ in range(12_345)]
    curve[777], curve[9_000] = 9999.0, -9999.0
    steps, values = thinned(column(curve), 200)
    assert len(steps) <= 200 and steps == sorted(steps)
    kept = dict(zip(steps, values, strict=True))
    assert kept[778] == 9999.0 and kept[9_001] == -9999.0
    assert set(kept.items()) <= set(enumerate(curve, 1))


def test_thinned_by_hand() -> None:
    """Two parts of three points: (1, 3, 2) keeps 1 and 3, (5, 5, 5) keeps one 5."""
    curve = column([1.0, 3.0, 2.0, 5.0, 5.0, 5.0])
    assert thinned(curve, 4) == ([1, 2, 4, 6], [1.0, 3.0, 5.0, 5.0])
    assert thinned(curve, 6) == ([1, 2, 3, 4, 5, 6], [1.0, 3.0, 2.0, 5.0, 5.0, 5.0])
    assert thinned(column([None, None, None, 1.0, None, None]), 4) == ([1, 4], [None, 1.0])
    assert thinned(column([]), 4) == ([], [])


def test_points_keep_gaps_and_six_digits() -> None:
    rows = [{"step": 1, "a": 0.123456789}, {"step": 2}, {"step": 3, "a": None}, {"step": 4, "a": 2.0}]
    rows.append({"step": 5, "a": 10**400})  # no float is so large
    assert thinned(MetricTable.of(rows).column("a"), 10) == ([1, 3, 4, 5], [0.123457, None, 2, None])


def test_the_section_of_a_run(tmp_path: Path) -> None:
    data = section(RunFiles(write_run(tmp_path / "run", steps=30))).data  # type: ignore[union-attr]
    assert data["attempts"] == [[1, 0], [2, 10], [3, 12]] and data["left_out"] == 0
    grid, values = data["curves"]["val/score/mean"]
    assert data["grids"][grid] == [0, 10, 20, 30] and values == [0.4, 0.405, 0.41, 0.415]
    assert len(data["curves"]) == METRICS_OF_A_STEP - 1 + 2  # `step` is no metric, some steps have two of a validation
    assert data["defaults"][:2] == ["critic/rewards/mean", "val/score/mean"]
    assert len(data["grids"]) == 3  # of all steps, of validations, of the others: metrics of the same steps share them


def test_a_long_run_is_thinned_and_a_run_without_metrics_has_no_section(tmp_path: Path) -> None:
    data = section(RunFiles(write_run(tmp_path / "run", steps=1500))).data  # type: ignore[union-attr]
    assert data["steps"] == 1501 and max(map(len, data["grids"])) <= MAX_POINTS
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert section(RunFiles(tmp_path / "run")) is None
