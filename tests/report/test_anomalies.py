"""Each warning on a series made by hand: it names the step at which it begins, and is silent beside its condition."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from hpcrl.metrics.metric_table import MetricTable
from hpcrl.report.anomalies import Anomaly, anomalies, series, smoothed, stretch
from tests.report.synthetic import row


def rows(**columns: Iterable[Any]) -> list[dict[str, Any]]:
    """Rows of steps 1, 2, ...; `a__b` is the metric a/b."""
    names = [name.replace("__", "/") for name in columns]
    lines = zip(*columns.values(), strict=True)
    return [{"step": step} | dict(zip(names, values, strict=True)) for step, values in enumerate(lines, 1)]


def found(series: list[dict[str, Any]], max_staleness: float | None = None) -> list[Anomaly]:
    return anomalies(MetricTable.of(series), max_staleness, [])


def test_a_usual_run_has_no_warnings() -> None:
    assert found([row(step) for step in range(500)], 1.0) == []
    assert found([]) == []


ENTROPY, KL, MISMATCH = "critic__entropy__mean", "critic__kl", "mismatch__kl_k3"
CUT, SPEED = "token__response_length__clip_ratio", "scheduler__replica_speed"
FALLS = [1.0] * 10 + [0.01] * 10
Make = Callable[[], list[dict[str, Any]]]


@pytest.mark.parametrize(
    ("make", "title", "step", "until"),
    [
        (
            lambda: rows(critic__advantages__min=[-1.0] * 4 + [0.0] * 6, critic__advantages__max=[1.0] * 4 + [0.0] * 6),
            "No signal in groups",
            5,
            None,
        ),
        (
            lambda: rows(scheduler__filtered_std=[10] * 2 + [90] * 6 + [10] * 2, scheduler__query_use_count=[100] * 10),
            "Few groups with a signal",
            3,
            8,
        ),
        # The median of five steps is low from the third low one on: step 13.
        (lambda: rows(**{ENTROPY: FALLS}), "Entropy collapse", 13, None),
        (lambda: rows(**{KL: [0.01] * 10 + [0.3] * 10}), "KL to the reference is large", 13, None),
        (lambda: rows(**{MISMATCH: [1e-4] * 10 + [2e-3] * 10}), "Mismatch of generator and trainer grows", 13, None),
        (lambda: rows(**{CUT: [0.1] * 10 + [0.3] * 10}), "Responses are truncated", 13, None),
        (lambda: rows(**{CUT: [0.7] * 10}), "Responses are truncated", 1, None),
        (lambda: rows(scheduler__staleness__mean=[1.0] * 5 + [2.0] * 10), "Staleness is at its bound", 6, None),
        (
            lambda: rows(**{f"{SPEED}__mean": [1.0] * 10, f"{SPEED}__min": [0.9] * 4 + [0.4] * 6}),
            "A slow rank",
            5,
            None,
        ),
        (
            lambda: rows(time__step_total=[10.0] * 20, time__step_reward_wait=[1.0] * 10 + [5.0] * 10),
            "Waiting for rewards",
            13,
            None,
        ),
        (lambda: rows(actor__total_loss=[1.0, None, None, 1.0]), "The loss is not finite", 2, 3),
        (lambda: rows(actor__grad_norm=[1.0, None]), "The norm of the gradients is not finite", 2, None),
        (lambda: rows(scheduler__score_errors=[0, 0, 3, 1, 0]), "Rewards or environments fail", 3, 4),
    ],
)
def test_a_warning_begins_at_its_step(make: Make, title: str, step: int, until: int | None) -> None:
    (only,) = found(make(), 2.0)
    assert (only.title, only.step, only.until) == (title, step, until)
    assert only.metrics and only.text.endswith(".")


@pytest.mark.parametrize(
    "make",
    [
        # Four steps without a signal, then one with.
        lambda: rows(critic__advantages__min=[0.0] * 4 + [-1.0], critic__advantages__max=[0.0] * 4 + [1.0]),
        lambda: rows(scheduler__filtered_std=[79] * 10, scheduler__query_use_count=[100] * 10),
        lambda: rows(scheduler__filtered_std=[0] * 10, scheduler__query_use_count=[0] * 10),
        lambda: rows(**{ENTROPY: [1.0] * 10 + [0.2] * 10}),  # low, but no collapse
        lambda: rows(**{ENTROPY: [0.04] * 20}),  # near 0 from the start, and not less
        lambda: rows(**{ENTROPY: [1.0] * 10 + [0.01] + [1.0] * 9}),  # one outlier
        lambda: rows(**{KL: [0.01, None] * 10}),
        lambda: rows(**{MISMATCH: [1e-9] * 10 + [1e-6] * 10}),  # a thousand times more of nothing
        lambda: rows(**{CUT: [0.1] * 10 + [0.2] * 10}),
        lambda: rows(scheduler__staleness__mean=[1.8] * 20),
        lambda: rows(**{f"{SPEED}__mean": [1.0] * 10, f"{SPEED}__min": [0.7] * 10}),
        lambda: rows(time__step_total=[10.0] * 20, time__step_reward_wait=[2.0] * 20),
        lambda: rows(scheduler__score_errors=[0] * 10),
    ],
)
def test_no_warning_beside_the_condition(make: Make) -> None:
    assert found(make(), 2.0) == []


def test_staleness_without_a_bound_is_no_warning() -> None:
    made = rows(scheduler__staleness__mean=[0.0] * 20)
    assert found(made, 0.0) == found(made, None) == []


def test_failing_rewards_quote_the_most_frequent_error() -> None:
    kinds = [{"count": 7, "error": "KeyError: 'a' (mine.py:3)"}, {"count": 1, "error": "other"}]
    (only,) = anomalies(MetricTable.of(rows(scheduler__score_errors=[0, 4, 4])), None, kinds)
    assert only.step == 2 and only.until is None
    assert only.text.startswith("8 samples had an error") and only.text.endswith("7 times: KeyError: 'a' (mine.py:3)")
    (only,) = anomalies(MetricTable(), None, kinds)  # before the first step was logged
    assert only.step is None


def test_what_still_holds_comes_first() -> None:
    made = rows(**{ENTROPY: FALLS, "actor__total_loss": [1.0, None] + [1.0] * 18})
    assert [each.title for each in found(made)] == ["Entropy collapse", "The loss is not finite"]


def test_the_last_of_two_stretches_counts() -> None:
    values = [(step, float(value)) for step, value in enumerate([1, 1, 1, 0, 1, 1, 1, 1, 0, 0], 1)]
    last = stretch(values, bool, 3)
    assert last is not None and (last.first, last.last) == (5, 8)
    assert stretch(values, bool, 5) is None


def test_series_leave_out_step_0_and_what_is_not_finite() -> None:
    made = [{"step": 0, "a": 1.0}, {"step": 1, "a": None}, {"step": 2}, {"step": 3, "a": 2}, {"step": 4, "a": "x"}]
    assert series(MetricTable.of(made), "a") == [(3, 2.0)]
    assert smoothed([(1, 1.0), (2, 9.0), (3, 2.0)], 3) == [(1, 1.0), (2, 5.0), (3, 2.0)]
