"""The credit of RAFT++ (arXiv 2504.11343): only responses with a positive reward are learned from, as they are."""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.advantage_estimator import ReturnsCredit
from hpcrl.algorithms.interface import RewardTable
from hpcrl.algorithms.spec import RaftPlusPlus
from hpcrl.metrics.stats import Stats, stat


class RaftPlusPlusCredit(ReturnsCredit[RaftPlusPlus]):
    """See the module's docstring."""

    def normalize(self, table: RewardTable) -> Tensor:
        """See ReturnsCredit."""
        return table.rewards

    def weigh(self, table: RewardTable) -> tuple[Tensor, Stats]:
        """See ReturnsCredit."""
        weights, stats = super().weigh(table)
        positive = table.rewards > self.config.positive_above
        return weights * positive, stats | {"actor/positive_ratio": stat(positive)}
