"""The advantage estimator of REINFORCE (Williams 1992): discounted returns as advantages, rewards normalised as
configured."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hpcrl.algorithms.advantage_estimator import ReturnsAdvantage
from hpcrl.algorithms.functional import normalize_rewards
from hpcrl.algorithms.interface import AllSum, Coefficients, RewardTable
from hpcrl.algorithms.reward_statistics import carried, running_moments
from hpcrl.algorithms.spec import Reinforce
from hpcrl.metrics.stats import Stat, Stats
from hpcrl.rollout.batch import Batch


class ReinforceAdvantage(ReturnsAdvantage[Reinforce]):
    """See the module's docstring."""

    def __init__(self, config: Reinforce):
        super().__init__(config)
        self.gamma = config.gamma
        self._runs = "running" in (config.norm_mean_type, config.norm_std_type)

    def normalize(self, table: RewardTable) -> Tensor:
        """See ReturnsAdvantage."""
        config, rewards, groups = self.config, table.rewards, table.group_ids
        mean, std = config.norm_mean_type, config.norm_std_type
        running = running_moments(table, self.coefficients)[0] if self._runs else None
        return normalize_rewards(rewards, groups, mean, std, config.std_eps, table.domain_ids()[1], running)

    def assign(self, batch: Batch, table: RewardTable, all_sum: AllSum) -> Stats:
        """See ReturnsAdvantage."""
        stats = super().assign(batch, table, all_sum)
        return stats | running_moments(table, self.coefficients)[1] if self._runs else stats

    def adapt(self, stats: Mapping[str, Stat]) -> Coefficients:
        """See Adaptive: the running moments."""
        return {**super().adapt(stats), **carried(self.coefficients, stats)}
