"""Group-in-group policy optimisation (GiGPO, arXiv 2505.10978): episodes are compared within their group, and turns
with the group's turns that began in the same state (what the model saw).

A_t = norm(R) + step_weight norm(G_t)   R: the episode's reward, normalised over the group; G_t: the return of turn t,
                                        normalised over the group's turns with the same state; norm(G_t) is 0 if the
                                        state occurs once
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.algorithms.functional import Over, normalize_rewards
from hpcrl.algorithms.interface import RewardTable
from hpcrl.algorithms.spec import GiGPO
from hpcrl.algorithms.turns import TurnAdvantage, TurnTable


class GiGPOAdvantage(TurnAdvantage[GiGPO]):
    """See the module's docstring."""

    def compare(self, turns: TurnTable, table: RewardTable) -> Tensor:
        """See TurnAdvantage."""
        config = self.config
        std: Over = "group" if config.std_normalize else None
        episodes = normalize_rewards(table.rewards, table.group_ids, "group", std, config.std_eps)
        pairs = torch.stack([turns.group_ids, turns.states], 1)
        _, same = torch.unique(pairs, dim=0, return_inverse=True)
        steps = normalize_rewards(turns.returns, same, "group", std, config.std_eps)
        return episodes[turns.episodes] + config.step_weight * steps
