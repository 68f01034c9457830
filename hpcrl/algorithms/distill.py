"""The advantage estimator of on-policy distillation: the teacher's judgement of each token, without a task's reward.

A_t = coef (log teacher(t) - log policy(t))      t: a token that the policy drew; policy: before the step

Its mean over the policy's tokens is minus the reverse KL(policy, teacher), and the policy gradient with this advantage
is the gradient of that KL without the effect of a token on later ones (a discount of 0), as in Thinking Machines' On-
Policy Distillation (2025) and ROLL's on-policy distillation. Optional: a KL to the reference in the reward
(kl_reward_coef), whitening, clipping (hpcrl.algorithms.advantage_estimator). Rewards of a task are only logged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.algorithms.advantage_estimator import ReturnsAdvantage, clip
from hpcrl.algorithms.interface import RewardTable, required
from hpcrl.algorithms.spec import Distill
from hpcrl.rollout.batch import Batch

FIELDS = ("old_logprobs", "teacher_logprobs")


class DistillAdvantage(ReturnsAdvantage[Distill]):
    """See the module's docstring."""

    gamma = 0.0

    def __init__(self, config: Distill, coef: float = 1.0):
        super().__init__(config)
        self.reads |= {*FIELDS}
        self.coef = coef

    def normalize(self, table: RewardTable) -> Tensor:
        """See ReturnsAdvantage: a task's rewards do not enter the loss."""
        return torch.zeros_like(table.rewards)

    def token_rewards(self, batch: Batch, table: RewardTable, positions: Tensor, index: Tensor) -> Tensor:
        """float32 [M]: the clipped log-ratio of teacher and policy, times coef."""
        policy, teacher = (required(batch, field, "algorithm=distill")[index] for field in FIELDS)
        return clip(self.coef * (teacher - policy), self.config.reward_clip)
