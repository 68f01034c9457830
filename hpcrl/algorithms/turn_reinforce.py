"""REINFORCE by turn: the return of a turn, normalised over the turns of the batch or of the group as configured."""

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
