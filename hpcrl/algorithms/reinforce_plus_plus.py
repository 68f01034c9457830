"""REINFORCE++ (arXiv 2501.03262): rewards normalised by mean and std of the whole batch, then returns and PPO clip."""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.base import RewardTable
from hpcrl.algorithms.functional import normalize_rewards
from hpcrl.algorithms.policy_gradient import PolicyGradient
from hpcrl.config import ReinforcePlusPlus as ReinforcePlusPlusConfig


class ReinforcePlusPlus(PolicyGradient[ReinforcePlusPlusConfig]):
    """See the module's docstring."""

    def __init__(self, config: ReinforcePlusPlusConfig):
        super().__init__(config)
        self.gamma = config.gamma

    def normalize(self, table: RewardTable) -> Tensor:
        return normalize_rewards(table.rewards, table.group_ids, "batch", "batch", self.config.std_eps)
