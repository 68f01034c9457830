"""REINFORCE by turn: a turn's return, normalised over the batch's or the group's turns as configured."""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.functional import normalize_rewards
from hpcrl.algorithms.interface import RewardTable
from hpcrl.algorithms.spec import TurnReinforce
from hpcrl.algorithms.turns import TurnAdvantage, TurnTable


class TurnReinforceAdvantage(TurnAdvantage[TurnReinforce]):
    """See the module's docstring."""

    def compare(self, turns: TurnTable, table: RewardTable) -> Tensor:
        """See TurnAdvantage."""
        config = self.config
        mean, std = config.norm_mean_type, config.norm_std_type
        return normalize_rewards(turns.returns, turns.group_ids, mean, std, config.std_eps, turns.domain_ids)
