"""An advantage estimator that reads token rewards; only for the trainers, since it imports torch."""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms import functional as F
from hpcrl.algorithms.interface import AdvantageEstimator, AllSum, RewardTable, model_tokens, required
from hpcrl.metrics.stats import Stats
from hpcrl.rollout.batch import Batch
from hpcrl.spec.policy_loss import PolicyLoss


class StepAdvantage(AdvantageEstimator):
    """The advantage of a token is the sum of its response's rewards from there on."""

    def __init__(self, config: PolicyLoss):
        self.config = config

    def assign(self, batch: Batch, table: RewardTable, all_sum: AllSum) -> Stats:
        """See AdvantageEstimator."""
        index = model_tokens(batch)
        rewards: Tensor = required(batch, "token_rewards", "advantages of steps")
        returns = F.discounted_returns(rewards[index], batch.row_ids[index], 1.0)
        batch.returns = batch.advantages = rewards.new_zeros(batch.num_tokens).index_copy(0, index, returns)
        return {}
