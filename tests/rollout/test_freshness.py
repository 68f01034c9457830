"""The arithmetic of max_staleness at its boundaries."""

from __future__ import annotations

import pytest

from hpcrl.rollout.scheduling.groups import LiveGroup, Start
from hpcrl.rollout.scheduling.staleness import StalenessBound

VERSION, NEED = 9, 4


def groups(*lags: int) -> list[LiveGroup]:
    return [LiveGroup(Start(uid), VERSION - lag, 2, 2) for uid, lag in enumerate(lags)]


@pytest.mark.parametrize(
    ("max_staleness", "lags", "old"),
    [
        (1.5, [2, 2, 2, 2], [2, 3]),  # half of 4 may be 2 behind
        (1.5, [2, 2], []),
        (1.5, [3, 2, 2, 3], [0, 3]),  # none may be 3 behind, and such a group does not use up the share
        (1.5, [0, 1, 1, 1, 1, 1], []),  # whole steps have no limit of number
        (1.0, [1, 2], [1]),
        (0.25, [1, 1], [1]),
        (0.0, [0, 1], [1]),
        (2.75, [3, 3, 3, 3], [3]),
    ],
)
def test_a_share_of_a_batch_may_be_one_version_further_behind(
    max_staleness: float, lags: list[int], old: list[int]
) -> None:
    assert [group.uid for group in StalenessBound(max_staleness).too_stale(groups(*lags), VERSION, NEED)] == old


@pytest.mark.parametrize(
    ("max_staleness", "lags", "due"),
    [
        (1.0, [1], [(1, 0)]),  # (groups, room later): the next batch would find it 2 behind
        (1.5, [1, 1], []),  # the share of the next batch has room for both
        (1.5, [1, 1, 1], [(3, 2)]),
        (1.5, [2, 1], [(1, 0)]),  # 2 behind: now or never
        (1.5, [2, 1, 1], [(1, 0), (3, 2)]),
        (2.0, [1] * 4, []),  # one more batch may take them whatever their number
        (2.0, [1] * 5, [(5, 4)]),
        (2.5, [1] * 6, []),
        (2.5, [1] * 7, [(7, 6)]),
        (2.0, [0] * 9, []),
    ],
)
def test_groups_that_later_batches_cannot_take_are_due(
    max_staleness: float, lags: list[int], due: list[tuple[int, int]]
) -> None:
    found = StalenessBound(max_staleness).due(groups(*lags), {0}, VERSION, NEED)
    assert [(len(entry.uids), entry.later) for entry in found] == due
    assert all(entry.open == {0} & entry.uids for entry in found)


@pytest.mark.parametrize(
    ("lags", "still_open", "met"),
    [
        ([1, 1], {1}, False),  # both are due
        ([1, 1], set(), True),
        ([1] * 6, {3, 4, 5}, False),  # all 6 are due, and a batch takes 4 of them
        ([1] * 6, {4, 5}, True),
    ],
)
def test_a_batch_waits_for_as_many_due_groups_as_it_can_take(lags: list[int], still_open: set[int], met: bool) -> None:
    (due,) = StalenessBound(1.0).due(groups(*lags), still_open, VERSION, NEED)
    assert due.is_met(NEED) == met


def test_number_of_groups_generated_ahead() -> None:
    assert [StalenessBound(lag).ahead(NEED) for lag in (0.0, 0.25, 1.0, 1.5)] == [0, 1, 4, 6]
