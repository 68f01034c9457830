"""Balance over ranks and micro-batches: properties, hand-made cases, and the remaining imbalance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.controller.balance import UNITS_PER_RANK, balance, cost, micro_batches

LENGTHS = st.lists(st.integers(1, 5000), max_size=60)


@given(LENGTHS, st.integers(1, 9))
def test_balance_holds_every_row_once(lengths: list[int], num_ranks: int) -> None:
    ranks = balance(lengths, num_ranks)
    assert len(ranks) == num_ranks
    assert sorted(row for rows in ranks for row in rows) == list(range(len(lengths)))
    assert all(rows == sorted(rows) for rows in ranks)
    if len(lengths) >= num_ranks:
        loads = [sum(cost(lengths[row]) for row in rows) for rows in ranks]
        # No partition of differences leaves ranks further apart than the largest row.
        assert max(loads) - min(loads) <= max(cost(n) for n in lengths)


@given(LENGTHS, st.integers(1, 9), st.integers(1, 8))
def test_group_members_stay_together_where_ranks_have_a_choice(lengths: list[int], num_ranks: int, size: int) -> None:
    groups = [row // size for row in range(len(lengths))]
    ranks = balance(lengths, num_ranks, groups=groups)
    assert sorted(row for rows in ranks for row in rows) == list(range(len(lengths)))
    homes = [{groups[row] for row in rows} for rows in ranks]
    if len(set(groups)) >= UNITS_PER_RANK * num_ranks:
        assert sum(map(len, homes)) == len(set(groups))  # no group is in two places


def test_few_groups_are_cut_evenly() -> None:
    ranks = balance([10] * 16, 4, groups=[0] * 8 + [1] * 8)
    assert [len(rows) for rows in ranks] == [4, 4, 4, 4]
    ranks = balance([10] * 32, 2, groups=[row // 4 for row in range(32)])
    assert [len(rows) for rows in ranks] == [16, 16]


@pytest.mark.parametrize(
    ("size", "num_groups", "heavy", "length"),
    [
        (16, 1, {0, 8}, 69),  # 8 units for 2 ranks: 1 group in 8 parts of 2 rows
        (6, 3, {0, 3}, 80),  # 9 units, as 6 are too few: 3 groups in 3 parts of 2 rows each
    ],
)
def test_groups_are_cut_into_as_many_parts_as_balancing_needs(
    size: int, num_groups: int, heavy: set[int], length: int
) -> None:
    """Two heavy rows weigh as much as all others. They are one unit and get their own rank: with more parts they would
    be on two ranks, with fewer they would take light rows along."""
    count = size * num_groups
    lengths = [length if row in heavy else 10 for row in range(count)]
    ranks = balance(lengths, 2, [row // size for row in range(count)])
    assert sorted(map(set, ranks), key=len) == [heavy, set(range(count)) - heavy]


@given(LENGTHS, st.integers(1, 9), st.integers(1, 6000))
def test_rows_of_a_pair_are_never_separated(lengths: list[int], num_ranks: int, max_tokens: int) -> None:
    """Every third row is single, the others are pairs whose rows are far apart in the batch."""
    half = -(-len(lengths) // 2)
    together = [None if row % 3 == 0 else row % half for row in range(len(lengths))]
    groups = [row % 5 for row in range(len(lengths))]
    pairs = {n: {row for row, other in enumerate(together) if other == n} for n in together if n is not None}
    ranks = balance(lengths, num_ranks, groups, together)
    assert sorted(row for rows in ranks for row in rows) == list(range(len(lengths)))
    assert all(any(pair <= set(rows) for rows in ranks) for pair in pairs.values())
    (plan,) = micro_batches([lengths], max_tokens, [groups], [together])
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    for rows in plan:
        assert all(pair <= set(rows) or pair.isdisjoint(rows) for pair in pairs.values())
        if sum(lengths[row] for row in rows) > max_tokens:  # only what cannot be cut
            assert len(rows) == 1 or set(rows) in pairs.values()


def test_pairs_by_hand() -> None:
    together = [7, None, 7, 3, 3]
    assert micro_batches([[6, 4, 6, 5, 5]], 10, together_per_rank=[together]) == [[[0, 2], [3, 4], [1]]]  # 12 > 10
    assert micro_batches([[6, 4, 6, 5, 5]], 10) == [[[0, 1], [2], [3, 4]]]
    assert balance([9, 1, 1, 5, 5], 2, together=together) == [[1, 3, 4], [0, 2]]
    assert balance([9, 1, 1, 5, 5], 2) == [[2, 3, 4], [0, 1]]  # 0 and 2 separated
    # a pair stays in one part if its prompt's rows are cut
    assert micro_batches([[4, 4, 4, 4]], 8, [[0] * 4], [[None, 1, None, 1]]) == [[[1, 3], [0, 2]]]


def test_balance_by_hand() -> None:
    assert balance([8, 7, 6, 5, 4], 1) == [[0, 1, 2, 3, 4]]
    assert sorted(balance([10, 10, 20], 2)) == [[0, 1], [2]]
    assert sorted(balance([5], 3)) == [[], [], [0]]
    assert balance([], 2) == [[], []]
    assert balance([7] * 6, 3) == balance([7] * 6, 3)
    with pytest.raises(ValueError, match="over 0 ranks"):
        balance([1], 0)


def test_balance_of_a_long_tail_is_even() -> None:
    lengths = [40 + (i * i * 37) % 1000 for i in range(256)]
    loads = [sum(cost(lengths[row]) for row in rows) for rows in balance(lengths, 8)]
    assert max(loads) / min(loads) < 1.01
    in_order = [sum(cost(n) for n in lengths[r * 32 : r * 32 + 32]) for r in range(8)]
    assert max(in_order) / min(in_order) > 1.01  # otherwise the checks above prove nothing


@given(st.lists(LENGTHS, min_size=1, max_size=5), st.integers(1, 6000))
def test_micro_batches_properties(lengths_per_rank: list[list[int]], max_tokens: int) -> None:
    plans = micro_batches(lengths_per_rank, max_tokens)
    assert len({len(plan) for plan in plans}) == 1
    for lengths, plan in zip(lengths_per_rank, plans, strict=True):
        assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
        for rows in plan:
            total = sum(lengths[row] for row in rows)
            assert total <= max_tokens or len(rows) == 1
    assert any(all(plan) for plan in plans)  # no more than the fullest rank needs


@given(LENGTHS, st.integers(1, 6000), st.integers(1, 8))
def test_micro_batches_of_group_members(lengths: list[int], max_tokens: int, size: int) -> None:
    groups = [row // size for row in range(len(lengths))]
    (plan,) = micro_batches([lengths], max_tokens, [groups])
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= max_tokens or len(rows) == 1 for rows in plan)
    for group in set(groups):
        members = [row for row in range(len(lengths)) if groups[row] == group]
        if sum(lengths[row] for row in members) <= max_tokens:
            assert sum(not set(rows).isdisjoint(members) for rows in plan) == 1


def test_micro_batches_by_hand() -> None:
    assert micro_batches([[5, 5, 5, 5], [9], []], 10) == [[[0, 1], [2, 3]], [[0], []], [[], []]]
    assert micro_batches([[3, 50, 3]], 10) == [[[1], [0, 2]]]  # a giant has its own
    assert micro_batches([[], []], 10) == [[], []]
    with pytest.raises(ValueError, match="0 tokens"):
        micro_batches([[1]], 0)
