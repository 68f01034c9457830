"""What the clipped policy-gradient algorithms share; they differ in how rewards become advantages.

    token rewards = clip(normalised reward) on the last model token - kl_reward_coef KL(old, reference) on each
    returns       = discounted sums of token rewards = advantages, then whitened, then clipped
    loss          = weight x PPO clip + kl_loss_coef KL(policy, reference) - entropy_loss_coef entropy

The weight is 1, or with `correction` that of responses from older weights (functional.behaviour_weights).
Rows of weight 0 count nowhere. A mini-batch trained once on its own rollouts needs no old_logprobs: the ratio is 1 in
value and its gradient is that of the current log-probs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hpcrl.algorithms import functional as F
from hpcrl.algorithms.base import AllSum, RewardTable
from hpcrl.algorithms.metrics import LossSums, batch_stats
from hpcrl.config import PolicyLoss
from hpcrl.metrics.stats import Stats, stat
from hpcrl.rollout.batch import Batch, Norms

Section = TypeVar("Section", bound=PolicyLoss)


class PolicyGradient(ABC, Generic[Section]):
    """An Algorithm (algorithms/base.py) but for its rewards."""

    gamma = 1.0

    def __init__(self, config: Section):
        self.config = config
        self.needs_entropy = config.entropy_loss_coef != 0

    @abstractmethod
    def normalize(self, table: RewardTable) -> Tensor:
        """float32 [N]: the table's rewards as the advantage needs them."""

    def advantages(self, batch: Batch, table: RewardTable, all_sum: AllSum) -> Stats:
        """See Algorithm."""
        config, index = self.config, model_tokens(batch)
        rows = batch.row_ids[index]
        rewards = _clip(self.normalize(table), config.reward_clip)[_positions(table, batch)]
        token_rewards = torch.where(_is_last(rows), rewards[rows], 0.0)
        if config.kl_reward_coef > 0:
            old = _required(batch, "old_logprobs", "kl_reward_coef > 0")[index]
            ref = _required(batch, "ref_logprobs", "kl_reward_coef > 0")[index]
            kl = F.kl_divergence(old, ref, config.kl_reward_estimator)
            token_rewards = _clip(token_rewards - config.kl_reward_coef * kl, config.reward_clip)
        returns = F.discounted_returns(token_rewards, rows, self.gamma)
        advantages = F.whiten(returns, all_sum) if config.whiten_advantages else returns
        advantages = _clip(advantages, config.advantage_clip)
        zeros = torch.zeros(batch.num_tokens, device=returns.device)
        batch.returns, batch.advantages = zeros.index_copy(0, index, returns), zeros.index_copy(0, index, advantages)
        shaped = {"critic/advantages/*": stat(advantages), "critic/returns/*": stat(returns)}
        return batch_stats(batch, table) | shaped

    def policy_loss(self, logprobs: Tensor, entropy: Tensor | None, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        """A LossFn (engines/train/base.py)."""
        config, index = self.config, model_tokens(batch)
        rows, logprobs = batch.row_ids[index], logprobs[index]
        if config.ppo_epochs * config.num_mini_batches > 1:
            _required(batch, "old_logprobs", "more than one optimizer step per batch")
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[index]
        advantages = _required(batch, "advantages", "the policy loss")[index]
        ratio = F.importance_ratio(logprobs, old)
        token_losses, clipped = F.clipped_policy_loss(
            ratio, advantages, config.pg_clip_low, config.pg_clip_high, config.dual_clip
        )
        behaviour = batch.gen_logprobs if batch.gen_logprobs_behaviour is None else batch.gen_logprobs_behaviour
        if config.correction != "none":
            weights, cut = F.behaviour_weights(
                old, behaviour[index], rows, batch.num_sequences, config.correction_level, config.correction,
                config.correction_low, config.correction_high,
            )  # fmt: skip
            token_losses = weights * token_losses
        coefficients = F.token_coefficients(rows, batch.weights, config.loss_aggregation)
        total = pg_loss = (coefficients * token_losses).sum()
        sums = LossSums(batch, rows, coefficients, config.loss_aggregation)
        sums.add_loss("actor/pg_loss", pg_loss)
        if config.kl_loss_coef > 0:
            ref = _required(batch, "ref_logprobs", "kl_loss_coef > 0")[index]
            kl_loss = (coefficients * F.kl_divergence(logprobs, ref, config.kl_loss_estimator)).sum()
            total = total + config.kl_loss_coef * kl_loss
            sums.add_loss("actor/kl_loss", kl_loss)
        if self.needs_entropy:
            assert entropy is not None, "entropy_loss_coef needs the engine's entropy"
            total = total - config.entropy_loss_coef * (coefficients * entropy[index]).sum()
        sums.add_loss("actor/total_loss", total)
        sums.add_policy(ratio, logprobs - old, clipped)
        sums.add_train_infer(old, batch.gen_logprobs[index])
        if config.correction != "none":
            sums.add_tokens("actor/correction_mean", weights)
            sums.add_tokens("actor/correction_cut", cut)
        if entropy is not None:
            sums.add_tokens("critic/entropy/mean", entropy[index])
        if batch.ref_logprobs is not None:
            sums.add_tokens("critic/kl", F.kl_divergence(old, batch.ref_logprobs[index], "k3"))
        return total / F.denominator(norms, config.loss_aggregation), sums.stats()


def model_tokens(batch: Batch) -> Tensor:
    """int64 [M]: positions of the tokens that are trained on: the loss mask of the rows whose weight is not 0."""
    return (batch.loss_mask & (batch.weights > 0)[batch.row_ids]).nonzero().squeeze(1)


def _is_last(rows: Tensor) -> Tensor:
    """bool [M]: whether a token is the last of its row."""
    return torch.cat([rows[1:] != rows[:-1], torch.ones_like(rows[:1], dtype=torch.bool)])


def _positions(table: RewardTable, batch: Batch) -> Tensor:
    """int64 [B]: where the batch's rows stand in the table."""
    positions = torch.searchsorted(table.sample_ids, batch.sample_ids).clamp(max=table.sample_ids.numel() - 1)
    assert bool((table.sample_ids[positions] == batch.sample_ids).all()), "the reward table lacks samples of the batch"
    return positions


def _clip(values: Tensor, limit: float | None) -> Tensor:
    return values if limit is None else values.clamp(-limit, limit)


def _required(batch: Batch, field: str, reason: str) -> Tensor:
    tensor = getattr(batch, field)
    if tensor is None:
        raise ValueError(f"batch.{field} must be filled for {reason}")
    return tensor
