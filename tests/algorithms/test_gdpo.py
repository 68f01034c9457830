"""GDPO's advantages: by hand, and against TRL's formula (multi_objective_aggregation="normalize_then_sum")."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpcrl.algorithms.interface import RewardTable
from hpcrl.algorithms.spec import GDPO
from hpcrl.rollout.scheduling.policies import Decoupling
from tests.algorithms.pairs import make_pair
from tests.algorithms.test_algorithms import advantages, make_batch
from tests.rollout.test_decoupled import scored

MASKS = [[0, 1, 1], [0, 0, 1, 0, 1], [0, 1], [0, 1, 1]]


def test_decoupled_rewards_are_whitened_over_the_step() -> None:
    batch, _ = make_batch(MASKS, [1.0, 0.0, 3.0, 2.0], [4, 4, 9, 9])
    batch.decoupled_rewards = torch.tensor([1.0, -1.0, 2.0, -2.0])
    advantages(make_pair(GDPO(std_eps=0)), batch.check(), RewardTable.of(batch))
    unit = 0.3**0.5  # mean 0, variance 10 / 3
    wanted = [0, unit, unit, 0, 0, -unit, 0, -unit, 0, 2 * unit, 0, -2 * unit, -2 * unit]
    assert batch.advantages.tolist() == pytest.approx(wanted)


def test_rollouts_without_decoupled_rewards_are_refused() -> None:
    batch, table = make_batch(MASKS, [1.0, 0.0, 3.0, 2.0], [4, 4, 9, 9])
    with pytest.raises(ValueError, match="gdpo needs decoupled rewards"):
        advantages(make_pair(GDPO()), batch, table)


def of_trl(parts: Tensor, weights: Tensor, group_size: int) -> Tensor:
    """[N] advantages as TRL computes them from the reward functions' values `parts` [N, K]."""
    grouped = parts.view(-1, group_size, len(weights))
    apart = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    summed = (apart.flatten(0, 1) * weights).sum(1)
    return (summed - summed.mean()) / (summed.std() + 1e-4)


def test_advantages_match_trl() -> None:
    parts = torch.rand(12, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 0.1, 40.0])
    weights = {"right": 1.0, "format": 0.5, "length": 2.0}
    decoupling = Decoupling(1e-4, lambda domain: weights)
    found: list[float] = []
    for group in parts.split(4):
        found += decoupling.rewards(
            "", [scored(dict(zip(weights, row.tolist(), strict=True)), weights) for row in group]
        )
    batch, _ = make_batch([[0, 1]] * 12, [0.0] * 12, [uid for uid in (1, 2, 3) for _ in range(4)])
    batch.decoupled_rewards = torch.tensor(found)
    advantages(make_pair(GDPO(std_eps=1e-4)), batch.check(), RewardTable.of(batch))
    wanted = of_trl(parts, torch.tensor(list(weights.values())), 4)
    torch.testing.assert_close(batch.advantages[batch.loss_mask], wanted, rtol=1e-5, atol=1e-5)
