"""The advantage estimator of REINFORCE++ (arXiv 2501.03262): the KL is subtracted from unnormalised rewards, and the
returns are whitened over the batch's tokens unless whiten_advantages=false."""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.advantage_estimator import ReturnsAdvantage
from hpcrl.algorithms.interface import RewardTable
from hpcrl.algorithms.spec import ReinforcePlusPlus


class ReinforcePlusPlusAdvantage(ReturnsAdvantage[ReinforcePlusPlus]):
    """See the module's docstring."""

    def __init__(self, config: ReinforcePlusPlus):
        super().__init__(config)
        self.gamma = config.gamma

    def normalize(self, table: RewardTable) -> Tensor:
        """See ReturnsAdvantage. The rewards unchanged: if only they were normalised, the KL would get another relative
        weight."""
        return table.rewards
