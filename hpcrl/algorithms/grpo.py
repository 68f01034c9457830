"""The advantage estimator of GRPO (arXiv 2402.03300): compares a response with its group, without a critic.

A = (r - group mean) / (group std + eps), sample std; `std_normalize=false` omits the division; together with
`loss_aggregation=seq-mean-token-sum` this is Dr. GRPO (arXiv 2503.20783) up to a constant.
"""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.advantage_estimator import ReturnsAdvantage
from hpcrl.algorithms.functional import Over, normalize_rewards
from hpcrl.algorithms.interface import RewardTable
from hpcrl.algorithms.spec import GRPO


class GRPOAdvantage(ReturnsAdvantage[GRPO]):
    """See the module's docstring."""

    def normalize(self, table: RewardTable) -> Tensor:
        """See ReturnsAdvantage."""
        config = self.config
        std: Over = "group" if config.std_normalize else None
        return normalize_rewards(table.rewards, table.group_ids, "group", std, config.std_eps)
