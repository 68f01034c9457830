"""The advantage estimator of PPO with a critic over turns: bi-level GAE (VAGEN, arXiv 2510.16907), as in its authors'
code.

delta_k = x_k + turn_gamma V_(k+1) - V_k             over turns; x_k, V_k: reward and value of the last token of turn k
B_k     = delta_k + turn_gamma turn_lambd B_(k+1)    0 after the last turn
A_t     = B_k at the last token of turn k; before it x_t + gamma V_(t+1) - V_t + gamma lambd A_(t+1)
R_t     = A_t + V_t                                  the critic's target

For an episode with one turn it is GAE over the turn's tokens. A turn's reward is the environment's, and is not
normalised; a whole response's reward belongs to its last turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.algorithms.advantage_estimator import clip
from hpcrl.algorithms.gae import GAEAdvantage, gae, values_of
from hpcrl.algorithms.interface import RewardTable, is_last, model_tokens
from hpcrl.algorithms.spec import TurnGAE
from hpcrl.algorithms.turns import turn_rewards, turns_of
from hpcrl.rollout.batch import Batch


class TurnGAEAdvantage(GAEAdvantage[TurnGAE]):
    """See the module's docstring."""

    def token_rewards(self, batch: Batch, table: RewardTable, positions: Tensor, index: Tensor) -> Tensor:
        """See ReturnsAdvantage; a turn's reward is at its last token."""
        turns = turns_of(batch, index)
        return torch.where(is_last(turns), clip(turn_rewards(batch), self.config.reward_clip)[turns], 0.0)

    def propagate(self, token_rewards: Tensor, rows: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """See ReturnsAdvantage."""
        config, values, turns = self.config, values_of(batch), turns_of(batch, model_tokens(batch))
        ends = is_last(turns)
        of_turns = gae(token_rewards[ends], values[ends], rows[ends], config.turn_gamma, config.turn_lambd)
        # A turn ends with its return, so within the turn this is plain GAE.
        token_rewards = token_rewards.masked_scatter(ends, of_turns + values[ends])
        advantages = gae(token_rewards, values, turns, config.gamma, config.lambd)
        return advantages, advantages + values
