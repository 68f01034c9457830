"""The advantage estimator of RLOO (arXiv 2402.14740): a reward minus the mean reward of the group's other responses."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.algorithms.advantage_estimator import ReturnsAdvantage
from hpcrl.algorithms.interface import RewardTable
from hpcrl.algorithms.spec import RLOO


class RLOOAdvantage(ReturnsAdvantage[RLOO]):
    """See the module's docstring."""

    def normalize(self, table: RewardTable) -> Tensor:
        """See ReturnsAdvantage. A response without other group members has advantage 0, as with GRPO."""
        counts: Tensor
        _, groups, counts = torch.unique(table.group_ids, return_inverse=True, return_counts=True)
        rewards = table.rewards.double()
        means = (rewards.new_zeros(len(counts)).index_add(0, groups, rewards) / counts)[groups]
        size = counts[groups]
        return ((rewards - means) * size / (size - 1).clamp(min=1)).float()
