"""The advantage estimator of GDPO (arXiv 2601.05242): a reward's parts are normalised separately within the group, so a
part with a large spread does not dominate the others.

A = (d - mean) / (std + eps) over the whole step, sample std; d: the decoupled reward, which sums the parts' advantages
with their weights (hpcrl.rollout.scheduling.policies).
"""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.advantage_estimator import ReturnsAdvantage
from hpcrl.algorithms.functional import normalize_rewards
from hpcrl.algorithms.interface import RewardTable
from hpcrl.algorithms.spec import GDPO


class GDPOAdvantage(ReturnsAdvantage[GDPO]):
    """See the module's docstring."""

    def normalize(self, table: RewardTable) -> Tensor:
        """See ReturnsAdvantage. ValueError for rollouts without decoupled rewards, such as rollouts stored by a run
        with another algorithm."""
        if table.decoupled is None:
            raise ValueError("algorithm.advantage_estimator=gdpo needs decoupled rewards, and these rollouts have none")
        return normalize_rewards(table.decoupled, table.group_ids, "all", "all", self.config.std_eps)
