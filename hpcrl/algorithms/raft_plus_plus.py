"""The advantage estimator of RAFT++ (arXiv 2504.11343): trains only on responses with a positive reward; rewards are
not normalised."""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.advantage_estimator import ReturnsAdvantage
from hpcrl.algorithms.interface import RewardTable
from hpcrl.algorithms.spec import RaftPlusPlus
from hpcrl.metrics.stats import Stats, stat


class RaftPlusPlusAdvantage(ReturnsAdvantage[RaftPlusPlus]):
    """See the module's docstring."""

    def normalize(self, table: RewardTable) -> Tensor:
        """See ReturnsAdvantage."""
        return table.rewards

    def response_weights(self, table: RewardTable) -> tuple[Tensor, Stats]:
        """See ReturnsAdvantage."""
        weights, stats = super().response_weights(table)
        positive = table.rewards > self.config.positive_above
        return weights * positive, stats | {"actor/positive_ratio": stat(positive)}
