"""The credit of REINFORCE (Williams 1992): discounted returns as advantages, rewards normalised as configured."""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.base import RewardTable
from hpcrl.algorithms.credit import ReturnsCredit
from hpcrl.algorithms.functional import normalize_rewards
from hpcrl.algorithms.specs import Reinforce


class ReinforceCredit(ReturnsCredit[Reinforce]):
    """See the module's docstring."""

    def __init__(self, config: Reinforce):
        super().__init__(config)
        self.gamma = config.gamma

    def normalize(self, table: RewardTable) -> Tensor:
        """See ReturnsCredit."""
        config = self.config
        mean, std = config.norm_mean_type, config.norm_std_type
        return normalize_rewards(table.rewards, table.group_ids, mean, std, config.std_eps)
