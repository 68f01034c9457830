"""The advantage estimator of runs in which no domain learns from its rewards (loss.NAME.policy)."""

from __future__ import annotations

import torch

from hpcrl.algorithms.interface import AdvantageEstimator, AllSum, RewardTable
from hpcrl.metrics.stats import Stats
from hpcrl.rollout.batch import Batch
from hpcrl.spec.policy_loss import PolicyLoss


class NoAdvantage(AdvantageEstimator):
    """Advantages and returns of 0. Rewards are only logged."""

    def __init__(self, config: PolicyLoss):
        pass

    def assign(self, batch: Batch, table: RewardTable, all_sum: AllSum) -> Stats:
        """See AdvantageEstimator."""
        batch.advantages, batch.returns = (torch.zeros(batch.num_tokens) for _ in range(2))
        return {}
