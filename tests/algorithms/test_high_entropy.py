"""The policy loss of the tokens with the highest entropy: by hand, and as many as TRL keeps."""

from __future__ import annotations

import pytest
import torch

from hpcrl.algorithms.interface import Outputs
from hpcrl.algorithms.spec import GRPO
from hpcrl.metrics.stats import flatten
from tests.algorithms.pairs import make_pair
from tests.algorithms.test_algorithms import make_batch, norms_of


def test_low_entropy_tokens_have_no_policy_loss() -> None:
    batch, _ = make_batch([[0, 1, 1, 1], [0, 1, 0, 1], [0, 1]], [0.0] * 3, [0] * 3)
    batch.weights = torch.tensor([1.0, 1.0, 0.0])
    batch.advantages = torch.tensor([1.0, -2.0, 3.0])[batch.row_ids] * batch.loss_mask
    batch.old_entropies = torch.tensor([0, 0.3, 2.0, 0.1, 0, 1.0, 0, 0.2, 0, 9.0])
    objective = make_pair(GRPO(entropy_share=0.3)).objective
    assert "old_entropies" in objective.reads and "old_entropies" not in make_pair(GRPO()).reads
    stats = flatten(objective.prepare(batch, lambda tensor: tensor))
    assert batch.high_entropy.nonzero()[:, 0].tolist() == [2, 5] and stats["actor/high_entropy/min"] == 1.0
    logprobs = batch.old_logprobs.clone().requires_grad_()
    loss, _ = objective.loss(Outputs(logprobs), batch, norms_of(batch))
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([0, 0, -1 / 5, 0, 0, 2 / 5, 0, 0, 0, 0])


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("count", [1, 2, 7, 41])
def test_number_of_kept_tokens_matches_trl(share: float, count: int) -> None:
    """TRL f2cd577, GRPOTrainer.get_high_entropy_mask: those at or above the quantile 1 - top_entropy_quantile."""
    batch, _ = make_batch([[0] + [1] * count], [0.0], [0])
    batch.old_entropies = torch.rand(count + 1, generator=torch.Generator().manual_seed(count)).double()
    threshold = torch.quantile(batch.old_entropies[1:], 1 - share)
    kept = batch.old_entropies[1:] >= threshold - 1e-12
    batch.old_entropies = batch.old_entropies.float()
    make_pair(GRPO(entropy_share=share)).objective.prepare(batch, lambda tensor: tensor)
    assert torch.equal(batch.high_entropy[1:], kept)


def test_a_rank_without_tokens_takes_part_in_the_selection() -> None:
    batch, _ = make_batch([[0, 0]], [0.0], [0])
    batch.old_entropies = torch.zeros(2)
    objective = make_pair(GRPO(entropy_share=0.5)).objective
    objective.prepare(batch, lambda tensor: tensor)
    assert not batch.high_entropy.any()
    batch.old_entropies = None
    with pytest.raises(ValueError, match="old_entropies must be filled for entropy_share below 1"):
        objective.prepare(batch, lambda tensor: tensor)
