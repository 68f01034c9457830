"""The base of advantage estimators for rewarded responses, which differ in reward normalisation.

weights       = which responses count, and how much (hpcrl.algorithms.weighting)
token rewards = clip(normalised reward) on the last model token - kl_reward_coef KL(old, reference) on each token,
                optionally whitened
returns       = discounted sums of token rewards over the model tokens of a row
advantages    = returns, optionally whitened, then clipped; 0 at the tokens of an expert's turns, which carry returns
                on but have no part in the whitening of advantages and in the KL
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hpcrl.algorithms import functional as F
from hpcrl.algorithms.adaptive import KL_SCALE
from hpcrl.algorithms.interface import AdvantageEstimator, AllSum, RewardTable, is_last, model_tokens, required
from hpcrl.algorithms.weighting import response_weights
from hpcrl.metrics.stats import Stats
from hpcrl.rollout.batch import Batch
from hpcrl.spec.policy_loss import PolicyLoss

LossSection = TypeVar("LossSection", bound=PolicyLoss)


class ReturnsAdvantage(AdvantageEstimator, Generic[LossSection]):
    """An advantage estimator without `normalize`; see the module's docstring."""

    gamma = 1.0

    def __init__(self, config: LossSection):
        self.config = config
        if config.kl_reward_coef > 0:
            self.reads = frozenset({"old_logprobs", "ref_logprobs"})

    @abstractmethod
    def normalize(self, table: RewardTable) -> Tensor:
        """float32 [N]: the normalised rewards of the table."""

    def response_weights(self, table: RewardTable) -> tuple[Tensor, Stats]:
        """(float32 [N], statistics): the weight of each response of the table; 0: not trained on."""
        return response_weights(self.config, table)

    def propagate(self, token_rewards: Tensor, rows: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(advantages before whitening, returns) of the batch's model tokens, float32 [M] each. token_rewards: [M];
        rows: int64 [M]."""
        returns = F.discounted_returns(token_rewards, rows, self.gamma)
        return returns, returns

    def assign(self, batch: Batch, table: RewardTable, all_sum: AllSum) -> Stats:
        """See AdvantageEstimator."""
        config, positions = self.config, positions_in(table, batch)
        weights, stats = self.response_weights(table)
        batch.weights = batch.weights * weights[positions]
        index = model_tokens(batch)
        advantages, returns = self.advantages_and_returns(batch, table, positions, index, all_sum)
        drawn = batch.versions[index] >= 0  # an expert's tokens have no advantage
        if config.whiten_advantages:
            advantages = torch.zeros_like(advantages).masked_scatter(drawn, F.whiten(advantages[drawn], all_sum))
        advantages = torch.where(drawn, clip(advantages, config.advantage_clip), 0.0)
        zeros = torch.zeros(batch.num_tokens, device=returns.device)
        batch.returns, batch.advantages = zeros.index_copy(0, index, returns), zeros.index_copy(0, index, advantages)
        return stats

    def token_rewards(self, batch: Batch, table: RewardTable, positions: Tensor, index: Tensor) -> Tensor:
        """float32 [M]: the clipped rewards of the model tokens `index`; a row's reward is at its last token."""
        rows = batch.row_ids[index]
        rewards = clip(self.normalize(table), self.config.reward_clip)[positions]
        return torch.where(is_last(rows), rewards[rows], 0.0)

    def advantages_and_returns(
        self, batch: Batch, table: RewardTable, positions: Tensor, index: Tensor, all_sum: AllSum
    ) -> tuple[Tensor, Tensor]:
        """(advantages before whitening, returns), float32 [M], of the batch's model tokens `index`; its rows are at
        these positions of the table. Collective over the ranks of all_sum."""
        config, rows = self.config, batch.row_ids[index]
        token_rewards = self.token_rewards(batch, table, positions, index)
        if config.kl_reward_coef > 0:
            old = required(batch, "old_logprobs", "kl_reward_coef > 0")[index]
            ref = required(batch, "ref_logprobs", "kl_reward_coef > 0")[index]
            kl = F.kl_divergence(old, ref, config.kl_reward_estimator)
            coefficient = config.kl_reward_coef * self.coefficients.get(KL_SCALE, 1.0)
            kl = torch.where(batch.versions[index] >= 0, kl, 0.0)  # estimated only at what the policy drew
            token_rewards = token_rewards - coefficient * kl  # not clipped: a clipped KL would not hold the policy
        token_rewards = F.whiten(token_rewards, all_sum) if config.whiten_rewards else token_rewards
        return self.propagate(token_rewards, rows, batch)


def positions_in(table: RewardTable, batch: Batch) -> Tensor:
    """int64 [B]: positions of the batch's rows in the table."""
    positions = torch.searchsorted(table.sample_ids, batch.sample_ids).clamp(max=table.sample_ids.numel() - 1)
    assert bool((table.sample_ids[positions] == batch.sample_ids).all()), "the reward table lacks samples of the batch"
    return positions


def clip(values: Tensor, limit: float | None) -> Tensor:
    """Clamped to +- limit; None: unchanged."""
    return values if limit is None else values.clamp(-limit, limit)
