"""The advantage estimator of PPO with a critic: generalised advantage estimation (GAE, arXiv 1506.02438).

delta_t = x_t + gamma V_(t+1) - V_t      x: token rewards; V_t: the value before token t
A_t     = delta_t + gamma lambd A_(t+1)  then optionally whitened, and clipped
R_t     = A_t + V_t                      with A_t before whitening: the critic's target

A and V are 0 after the last model token of a row, also if the token limit ended the row.
Tokens that the model did not write are skipped: the next token of t is the next model token of its row.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

from hpcrl.algorithms import functional as F
from hpcrl.algorithms.advantage_estimator import ReturnsAdvantage
from hpcrl.algorithms.interface import AllSum, RewardTable, is_last, model_tokens, required
from hpcrl.algorithms.spec import CriticLoss
from hpcrl.metrics.stats import Stats, scalar
from hpcrl.rollout.batch import Batch

CriticSection = TypeVar("CriticSection", bound=CriticLoss)


class GAEAdvantage(ReturnsAdvantage[CriticSection], Generic[CriticSection]):
    """See the module's docstring."""

    def __init__(self, config: CriticSection):
        super().__init__(config)
        self.reads |= {"values"}

    def normalize(self, table: RewardTable) -> Tensor:
        """See ReturnsAdvantage."""
        return table.rewards

    def propagate(self, token_rewards: Tensor, rows: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """See ReturnsAdvantage."""
        values = values_of(batch)
        advantages = gae(token_rewards, values, rows, self.config.gamma, self.config.lambd)
        return advantages, advantages + values

    def assign(self, batch: Batch, table: RewardTable, all_sum: AllSum) -> Stats:
        """See AdvantageEstimator. critic/explained_variance: 1 - Var(R - V) / Var(R) over the model tokens of all
        ranks."""
        stats, index = super().assign(batch, table, all_sum), model_tokens(batch)
        returns = required(batch, "returns", "critic/explained_variance")[index].double()
        spread = _variance(returns, all_sum)
        left = _variance(returns - values_of(batch).double(), all_sum)
        return stats | ({"critic/explained_variance": scalar(1 - left / spread)} if spread > 0 else {})


def values_of(batch: Batch) -> Tensor:
    """float32 [M]: the critic's values of the model tokens. ValueError without a critic's pass."""
    return required(batch, "values", "an algorithm with a critic")[model_tokens(batch)]


def gae(token_rewards: Tensor, values: Tensor, rows: Tensor, gamma: float, lambd: float) -> Tensor:
    """float32 [M]: A_t, see the module's docstring. token_rewards, values: [M]; rows: int64 [M], sorted."""
    after = torch.where(is_last(rows), 0.0, values.roll(-1).double())
    return F.discounted_returns(token_rewards.double() + gamma * after - values.double(), rows, gamma * lambd)


def _variance(values: Tensor, all_sum: AllSum) -> float:
    """Variance over the values of all ranks; 0 without values. Collective over the ranks of all_sum."""
    count: float
    total: float
    count, total = all_sum(torch.stack([values.new_tensor(float(values.numel())), values.sum()])).tolist()
    squares = all_sum((values - total / max(count, 1.0)).square().sum().reshape(1))
    return float(squares) / max(count, 1.0)
