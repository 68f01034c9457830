"""ReMax: hand-computed values, its unbiasedness, and what has no influence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcrl.algorithms.interface import Outputs, RewardTable
from hpcrl.algorithms.spec import ReMax
from hpcrl.metrics.stats import flatten
from hpcrl.rollout.batch import Norms
from tests.algorithms.pairs import make_pair
from tests.algorithms.test_algorithms import advantages, identity, make_batch

MASKS = [[0, 1, 1], [0, 0, 1, 0, 1], [0, 1], [0, 1, 1]]


def batch_with_baselines() -> tuple[Any, RewardTable]:
    """Two groups with greedy rewards .25 and 3."""
    batch, _ = make_batch(MASKS, [1.0, 0.0, 3.0, 2.0], [4, 4, 9, 9])
    batch.baselines = torch.tensor([0.25, 0.25, 3.0, 3.0])
    return batch.check(), RewardTable.of(batch)


def test_reward_is_compared_with_the_greedy_baseline() -> None:
    batch, table = batch_with_baselines()
    stats = flatten(advantages(make_pair(ReMax()), batch, table))
    assert batch.advantages.tolist() == [0, 0.75, 0.75, 0, 0, -0.25, 0, -0.25, 0, 0, 0, -1, -1]
    assert (stats["critic/baseline/mean"], stats["critic/baseline/min"]) == (1.625, 0.25)
    assert stats["critic/rewards/mean"] == 1.5, "of sampled responses"


def test_clip_kl_and_whitening_act_as_for_other_estimators() -> None:
    batch, table = batch_with_baselines()
    batch.old_logprobs, batch.ref_logprobs = torch.zeros(batch.num_tokens), torch.full((batch.num_tokens,), -2.0)
    advantages(make_pair(ReMax(reward_clip=0.5, kl_reward_coef=0.1)), batch, table)
    # clip(r - b) at the last token, minus .1 x (0 + 2) at each, summed from the end
    assert batch.advantages[batch.loss_mask].tolist() == pytest.approx([0.1, 0.3, -0.65, -0.45, -0.2, -0.9, -0.7])
    advantages(make_pair(ReMax(whiten_advantages=True)), batch, table)
    assert batch.advantages[batch.loss_mask].mean().item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("rows", [[3, 1, 0, 2], [2], [0, 3]])
def test_row_order_and_ranks_do_not_change_advantages(rows: list[int]) -> None:
    whole, table = batch_with_baselines()
    part = whole.select(rows)
    advantages(make_pair(ReMax()), whole, table)
    advantages(make_pair(ReMax()), part, table)
    assert part.advantages.tolist() == whole.select(rows).advantages.tolist()


def test_expected_gradient_equals_the_gradient_of_the_expected_reward() -> None:
    """Exactly, over all responses of one token, with the reward of the likeliest as the baseline and one response per
    prompt; by autograd through the objective and through sum p r."""
    rewards = torch.tensor([1.0, -2.0, 0.5])
    logits = torch.tensor([0.3, 0.1, 0.9], requires_grad=True)
    (wanted,) = torch.autograd.grad(-(logits.softmax(0) * rewards).sum(), logits)
    found = torch.zeros(3)
    for token, probability in enumerate(logits.softmax(0).tolist()):
        batch, _ = make_batch([[0, 1]], [rewards[token].item()], [0])
        batch.baselines = rewards[logits.argmax()].reshape(1)
        algorithm = make_pair(ReMax())
        algorithm.estimator.assign(batch, RewardTable.of(batch), identity)
        logprobs = torch.stack([torch.zeros(()), logits.log_softmax(0)[token]])
        batch.old_logprobs = None
        loss, _ = algorithm.objective.loss(Outputs(logprobs, torch.zeros(2)), batch, Norms(1.0, 1.0))
        found += probability * torch.autograd.grad(loss, logits)[0]
    torch.testing.assert_close(found, wanted)


def test_rollouts_without_a_greedy_baseline_are_named() -> None:
    batch, table = make_batch(MASKS, [1.0, 0.0, 3.0, 2.0], [4, 4, 9, 9])
    with pytest.raises(ValueError, match="remax needs the rewards of greedy responses"):
        advantages(make_pair(ReMax()), batch, table)
