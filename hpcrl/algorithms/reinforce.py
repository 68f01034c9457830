"""REINFORCE (Williams 1992): discounted returns as advantages, PPO clip; rewards normalised as configured."""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.base import RewardTable
from hpcrl.algorithms.functional import normalize_rewards
from hpcrl.algorithms.policy_gradient import PolicyGradient
from hpcrl.config import Reinforce as ReinforceConfig


class Reinforce(PolicyGradient[ReinforceConfig]):
    """See the module's docstring."""

    def __init__(self, config: ReinforceConfig):
        super().__init__(config)
        self.gamma = config.gamma

    def normalize(self, table: RewardTable) -> Tensor:
        config = self.config
        mean, std = config.norm_mean_type, config.norm_std_type
        return normalize_rewards(table.rewards, table.group_ids, mean, std, config.std_eps)
