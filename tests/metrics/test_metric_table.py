"""metrics.jsonl as columns, read on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.metrics.log import METRICS, read_metrics
from hpcrl.metrics.metric_table import MetricsReader, MetricTable

ROWS: list[dict[str, Any]] = [
    {"step": 0, "val/score/mean": 0.5},
    {"step": 1, "a": 1.0, "time/step_hand_over": 2.0},
    {"step": 2, "time/step_hand_over": 3.0, "a": None},
    {"step": 3, "a": 4, "time/step_hand_over": True, "odd": "text"},
    {"step": 4, "a": 10**400, "time/step_hand_over": [1]},
]


def line(row: Any) -> str:
    return json.dumps(row) + "\n"


def values(table: MetricTable, name: str) -> list[tuple[int, float | None]]:
    column = table.column(name)
    assert [int(step) for step in table.steps[column.rows]] == column.steps.tolist()
    return [(s, None if np.isnan(v) else v) for s, v in zip(column.steps.tolist(), column.values.tolist(), strict=True)]


def test_columns_have_the_values_of_the_rows_under_todays_names() -> None:
    table = MetricTable.of([*ROWS, {"step": "5", "a": 1}, {"a": 1}, {"step": 10**30, "a": 1}])
    assert len(table) == 5 and table.last_step == 4 and table.steps.tolist() == [0, 1, 2, 3, 4]
    assert values(table, "a") == [(1, 1.0), (2, None), (3, 4.0), (4, None)]
    assert values(table, "time/step_rollout_transfer") == [(1, 2.0), (2, 3.0), (3, 1.0), (4, None)]
    assert values(table, "odd") == [(3, None)] and values(table, "time/step_hand_over") == []
    assert table.names() == ["val/score/mean", "a", "time/step_rollout_transfer", "odd"]
    assert table.dense("a").tolist() == [0, 1, 0, 4, 0] and table.num_bytes == 8 * (2 + 3 + 3 + 4 + 3)
    assert not MetricTable() and MetricTable().last_step == 0 and MetricTable().dense("a").tolist() == []
    both = MetricTable.of([{"step": 1, "time/step_hand_over": 1.0, "time/step_rollout_transfer": 2.0}])
    assert values(both, "time/step_rollout_transfer") == [(1, 2.0)]


def test_a_file_is_read_on_from_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / METRICS, list[bytes]()
    reader = MetricsReader(path)
    assert len(reader.read()) == 0
    parse = MetricsReader._add
    monkeypatch.setattr(MetricsReader, "_add", lambda self, text: (read.append(text), parse(self, text))[1])
    path.write_text(line(ROWS[0]) + line(ROWS[1]) + line(ROWS[2])[:9])
    assert values(reader.read(), "a") == [(1, 1.0)] and len(read) == 2
    with path.open("a") as file:
        file.write(line(ROWS[2])[9:] + "{broken\n[1]\n" + "[" * 100_000 + "\n" + line(ROWS[3]))
    assert values(reader.read(), "a") == [(1, 1.0), (2, None), (3, 4.0)] and len(read) == 7
    assert len(reader.read()) == 4 and len(read) == 7
    assert [row["step"] for row in read_metrics(tmp_path)] == reader.read().steps.tolist() == [0, 1, 2, 3]
    assert [row["step"] for row in read_metrics(tmp_path, 30)] == []
    assert [row["step"] for row in read_metrics(tmp_path, len(line(ROWS[3])) + 1)] == [3]


@pytest.mark.parametrize("how", ["shorter", "longer", "other", "gone"])
def test_a_file_whose_beginning_changed_is_read_again(tmp_path: Path, how: str) -> None:
    """A resume moves rows away, and then writes others."""
    path, later = tmp_path / METRICS, [{"step": 2, "a": step / 7} for step in range(9)]
    path.write_text("".join(map(line, ROWS[:3])))
    reader = MetricsReader(path)
    assert len(reader.read()) == 3
    expected = [(2, row["a"]) for row in later]
    if how == "shorter":
        path.write_text(line(ROWS[0]))
        expected = []
    elif how == "longer":
        path.write_text("".join(map(line, later)))
    elif how == "other":
        (tmp_path / "new").write_text("".join(map(line, [*ROWS[:3], *later])))
        os.replace(tmp_path / "new", path)
        expected = [(1, 1.0), (2, None), *expected]
    else:
        path.unlink()
        expected = []
    assert values(reader.read(), "a") == expected
    assert values(reader.read(), "a") == expected


def test_steps_and_values_are_independent_of_the_table_that_grows() -> None:
    table = MetricTable.of([{"step": 1, "a": 1.0}])
    column, steps = table.column("a"), table.steps
    for step in range(2, 100):
        table.add({"step": step, "a": float(step)})
    assert column.values.tolist() == [1.0] and steps.tolist() == [1] and table.steps.dtype == np.int64
