"""How the controller derives shares, micro-batches and denominators from ids and sizes."""

from __future__ import annotations

from hpcrl.controller.batches import BatchHandle, assign_rows
from hpcrl.rollout.types import Sizes

SIZES = {sample: Sizes(10, 4) for sample in range(8)}
PAIRS = {0: 5, 7: 5, 1: 6, 2: 6}  # samples 0 and 7, 1 and 2


def test_samples_kept_together_share_rank_and_micro_batch() -> None:
    rows = assign_rows(SIZES, [sorted(SIZES)], [3, 4], keep_together=PAIRS)
    assert sorted(map(len, rows.values())) == [4, 4]
    handle = BatchHandle(1, 1, SIZES, [sorted(SIZES)], rows, keep_together=PAIRS)
    for max_tokens in (20, 10):  # two rows fit, or one
        plan = handle.plan(rows, handle.samples, max_tokens)
        placed = [{rows[rank][i] for i in micro_batch} for rank in rows for micro_batch in plan[rank]]
        assert {0, 7} in placed and {1, 2} in placed
        assert all(len(samples) <= max_tokens // 10 for samples in placed if samples.isdisjoint(PAIRS))


def test_samples_not_kept_together_may_be_separated() -> None:
    rows = assign_rows(SIZES, [sorted(SIZES)], [3, 4])
    plan = BatchHandle(1, 1, SIZES, [sorted(SIZES)], rows).plan(rows, sorted(SIZES), 10)
    assert all(len(micro_batch) == 1 for micro_batches in plan.values() for micro_batch in micro_batches)


def test_denominators_include_sample_weights() -> None:
    sizes = {1: Sizes(10, 4), 2: Sizes(9, 3), 3: Sizes(5, 0)}
    handle = BatchHandle(1, 1, sizes, [[1, 2, 3]], {0: [1, 2, 3]})
    assert handle.norms([1, 2, 3]) == (7.0, 2.0) and handle.norms([2]) == (3.0, 1.0)
    handle.weights = {1: 0.5, 3: 9.0}
    assert handle.norms([1, 2, 3]) == (5.0, 1.5)
