"""Clip-Cov and KL-Cov by hand; their losses against a plain reading of verl's formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcrl.algorithms.interface import Outputs
from hpcrl.algorithms.spec import GRPO
from hpcrl.config import parse
from hpcrl.metrics.stats import flatten
from hpcrl.rollout.batch import Batch
from tests.algorithms.pairs import make_pair
from tests.algorithms.test_algorithms import make_batch, norms_of

MASKS = [[0, 1, 1], [0, 0, 1, 0, 1, 1], [0, 1, 1, 1, 1]]


def marked(batch: Batch, **keys: Any) -> tuple[list[int], dict[str, float]]:
    """Indices of the marked tokens, and the logged values."""
    pair = make_pair(GRPO(**keys))
    assert "old_logprobs" in pair.reads
    stats = flatten(pair.objective.prepare(batch, lambda tensor: tensor))
    return batch.marked.nonzero()[:, 0].tolist(), stats


def example() -> Batch:
    """Advantages 1, 1, -1, -1 (mean 0) and log-probs -1, -3, -2, -6 (mean -3): covariances 2, 0, -1, 3."""
    batch, _ = make_batch([[0, 1, 1], [0, 1, 1], [0, 1]], [0.0] * 3, [0] * 3)
    batch.weights = torch.tensor([1.0, 2.0, 0.0])  # the last row is not learned from and counts in no mean
    batch.advantages = torch.tensor([0, 1.0, 1.0, 0, -1.0, -1.0, 0, 50.0])
    batch.old_logprobs = torch.tensor([0, -1.0, -3.0, 0, -2.0, -6.0, 0, -50.0])
    return batch


def test_marked_tokens_by_hand() -> None:
    found, stats = marked(example(), surrogate="kl_cov", cov_share=0.5)
    assert found == [1, 5] and stats["actor/marked_ratio"] == 0.5
    assert (stats["actor/covariance/max"], stats["actor/covariance/min"], stats["actor/covariance/mean"]) == (3, -1, 1)
    assert marked(example(), surrogate="kl_cov")[0] == [5], "one at least"
    keys: dict[str, Any] = {"surrogate": "clip_cov", "cov_share": 0.75}
    assert marked(example(), **keys)[0] == [1, 5]  # the others are below 1
    assert marked(example(), **keys, cov_high=2.5)[0] == [1]
    assert marked(example(), **keys, cov_low=-2.0)[0] != marked(example(), **keys)[0]
    assert marked(example(), **keys, cov_low=4.0)[0] == []
    empty = example().select([])
    assert marked(empty, surrogate="kl_cov")[0] == []


def test_clip_cov_draws_from_the_tokens_within_its_bounds() -> None:
    batch, _ = make_batch([[0] + [1] * 400] * 2, [0.0] * 2, [0] * 2)
    batch.advantages = torch.tensor([1.0, -1.0])[batch.row_ids] * batch.loss_mask
    found, _ = marked(batch, surrogate="clip_cov", cov_share=0.1, cov_low=-5.0, cov_high=5.0)
    assert len(found) == 80 and 20 < sum(place > 400 for place in found) < 60
    assert found != list(range(found[0], found[0] + 80))


@pytest.mark.parametrize("surrogate", ["clip_cov", "kl_cov"])
def test_losses_match_verls_formulas(surrogate: str) -> None:
    """verl 1dda039, core_algos.py, clip_cov (PPO's loss, times 0 for chosen tokens) and kl_cov (without a clip, plus a
    weighted |log-ratio| for chosen tokens)."""
    batch, _ = make_batch(MASKS, [0.0] * 3, [0] * 3, seed=4)
    batch.advantages = torch.tensor([0.7, -1.3, 1.1])[batch.row_ids] * batch.loss_mask
    keys: dict[str, Any] = {"cov_share": 0.3, "cov_low": 0.0, "cov_kl_coef": 0.6, "num_mini_batches": 2}
    pair = make_pair(GRPO(surrogate=surrogate, **keys))
    pair.objective.prepare(batch, lambda tensor: tensor)
    start = batch.old_logprobs + 0.4 * torch.cos(3 * torch.arange(batch.num_tokens))
    logprobs, other = (start.clone().requires_grad_() for _ in range(2))
    loss, stats = pair.objective.loss(Outputs(logprobs), batch, norms_of(batch))
    loss.backward()
    total, index = torch.zeros(()), batch.loss_mask.nonzero()[:, 0].tolist()
    for t in index:
        d, a = other[t] - batch.old_logprobs[t], batch.advantages[t]
        if surrogate == "kl_cov":
            total = total - d.exp() * a + (0.6 * d.abs() if batch.marked[t] else 0.0)
        elif not batch.marked[t]:
            total = total - torch.minimum(d.exp() * a, d.exp().clamp(0.8, 1.2) * a)
    (total / len(index)).backward()
    assert int(batch.marked.sum()) == 2
    torch.testing.assert_close(loss, total / len(index))
    torch.testing.assert_close(logprobs.grad, other.grad)
    assert (flatten(stats)["actor/clipfrac"] > 0) == (surrogate == "clip_cov")
    batch.marked = None
    with pytest.raises(ValueError, match=r"batch\.marked must be filled"):
        pair.objective.loss(Outputs(start), batch, norms_of(batch))


def test_a_penalty_without_effect_and_empty_bounds_are_refused() -> None:
    def section(**keys: Any) -> Any:
        return parse({"algorithm": {"advantage_estimator": "grpo", **keys}}).algorithm

    with pytest.raises(ValueError, match="kl_cov penalises how far"):
        section(surrogate="kl_cov")
    assert section(surrogate="kl_cov", num_mini_batches=2) and section(surrogate="kl_cov", ratio_to="generator")
    with pytest.raises(ValueError, match="cov_low: 5 must be below"):
        section(surrogate="clip_cov", cov_low=5)
