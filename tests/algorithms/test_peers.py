"""Advantages and losses against the formulas of other libraries and papers, computed on padded rows in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.algorithms.interface import Outputs, RewardTable
from hpcrl.algorithms.spec import ReinforcePlusPlus
from hpcrl.config import load
from hpcrl.rollout.batch import Batch
from tests.algorithms.pairs import make_pair
from tests.algorithms.test_algorithms import make_batch, norms_of

LENGTHS = [3, 1, 6, 4]
MASK = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def random_rows(seed: int) -> tuple[Batch, RewardTable, dict[str, Tensor]]:
    """Responses, and the same log-probs and rewards as padded rows."""
    random = torch.Generator().manual_seed(seed)
    rows = {name: -3 * torch.rand(MASK.shape, generator=random) for name in ("old", "ref", "new")}
    rewards = torch.randn(len(LENGTHS), generator=random) * 2
    batch, table = make_batch([[0] + [1] * length for length in LENGTHS], rewards.tolist(), [0, 0, 1, 1])
    batch.old_logprobs, batch.ref_logprobs = packed(rows["old"], batch), packed(rows["ref"], batch)
    return batch, table, {name: values.double() for name, values in (rows | {"rewards": rewards}).items()}


def packed(rows: Tensor, batch: Batch) -> Tensor:
    return torch.zeros(batch.num_tokens).masked_scatter(batch.loss_mask, rows[MASK].float())


# -- REINFORCE++


def returns_with_kl(rows: dict[str, Tensor], gamma: float, kl_coef: float) -> Tensor:
    """[B, T]: G_t = r_t + gamma G_(t+1), with the response's reward at its last token and the KL (k1) at every one."""
    rewards = -kl_coef * (rows["old"] - rows["ref"]) * MASK
    for row, length in enumerate(LENGTHS):
        rewards[row, length - 1] += rows["rewards"][row]
    for t in reversed(range(MASK.shape[1] - 1)):
        rewards[:, t] += gamma * rewards[:, t + 1]
    return rewards


def whitened(returns: Tensor, unbiased: bool) -> Tensor:
    """By mean and variance of the tokens: unbiased in verl, over their number in OpenRLHF and the paper."""
    tokens = returns[MASK]
    return (returns - tokens.mean()) / tokens.var(unbiased=unbiased).sqrt()


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_reinforce_plus_plus_subtracts_the_kl_first_and_then_whitens(seed: int, kl_coef: float, gamma: float) -> None:
    batch, table, rows = random_rows(seed)
    make_pair(ReinforcePlusPlus(gamma=gamma, kl_reward_coef=kl_coef)).estimator.assign(batch, table, lambda x: x)
    returns = returns_with_kl(rows, gamma, kl_coef)
    torch.testing.assert_close(batch.returns, packed(returns, batch), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(batch.advantages, packed(whitened(returns, True), batch), rtol=1e-5, atol=1e-5)
    count = sum(LENGTHS)
    openrlhf = whitened(returns, False) * ((count - 1) / count) ** 0.5
    torch.testing.assert_close(batch.advantages, packed(openrlhf, batch), rtol=1e-5, atol=1e-5)
    rows["rewards"] = (rows["rewards"] - rows["rewards"].mean()) / rows["rewards"].std()
    divided_first = packed(whitened(returns_with_kl(rows, gamma, kl_coef), True), batch)
    assert torch.allclose(batch.advantages, divided_first, atol=1e-4) == (kl_coef == 0 and gamma == 1)


# -- SAPO


def sapo_loss(new: Tensor, old: Tensor, advantages: Tensor, positive: float, negative: float) -> Tensor:
    """As in arXiv 2511.20347, verl and TRL: the mean over responses of the mean over their tokens."""
    ratio = torch.exp(new - old)
    tau = torch.where(advantages > 0, positive, negative)
    gains = 4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantages
    return -((gains * MASK).sum(1) / MASK.sum(1)).mean()


@pytest.mark.parametrize("seed", range(3))
def test_sapo_preset_has_the_loss_of_the_paper(seed: int) -> None:
    batch, _, rows = random_rows(seed)
    config: Any = load(["algorithm=sapo", "algorithm.num_mini_batches=2"]).algorithm
    batch.advantages = packed(rows["rewards"][:, None].expand(MASK.shape), batch)
    new = packed(rows["new"], batch).requires_grad_()
    loss, _ = make_pair(config).objective.loss(Outputs(new), batch, norms_of(batch))
    loss.backward()
    wanted = rows["new"].requires_grad_()
    found = sapo_loss(wanted, rows["old"], rows["rewards"][:, None], 1.0, 1.05)
    found.backward()
    assert loss.item() == pytest.approx(found.item(), rel=1e-5) and wanted.grad is not None
    torch.testing.assert_close(new.grad, packed(wanted.grad, batch), rtol=1e-4, atol=1e-6)
