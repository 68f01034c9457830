"""The credit of REINFORCE++ (arXiv 2501.03262): rewards are normalised by mean and std of the batch; returns are
whitened over the tokens of the batch unless whiten_advantages=false."""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.base import RewardTable
from hpcrl.algorithms.credit import ReturnsCredit
from hpcrl.algorithms.functional import normalize_rewards
from hpcrl.algorithms.specs import ReinforcePlusPlus


class ReinforcePlusPlusCredit(ReturnsCredit[ReinforcePlusPlus]):
    """See the module's docstring."""

    def __init__(self, config: ReinforcePlusPlus):
        super().__init__(config)
        self.gamma = config.gamma

    def normalize(self, table: RewardTable) -> Tensor:
        """See ReturnsCredit."""
        _, domains = table.domain_ids()
        return normalize_rewards(table.rewards, table.group_ids, "batch", "batch", self.config.std_eps, domains)
