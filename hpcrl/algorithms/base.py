"""What an algorithm is: advantages from rewards, and a policy loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hpcrl.metrics.stats import Stats
from hpcrl.rollout.batch import Batch, Norms

AllSum = Callable[[Tensor], Tensor]
"""Sum of a tensor over all ranks that hold a part of the batch (identity on one rank); collective over them."""


@dataclass(frozen=True)
class RewardTable:
    """Rewards of the whole step on all ranks, sorted by sample id: group and batch statistics need all of them.

    rewards float32 [N], group_ids int64 [N], sample_ids int64 [N], scores float32 [N].
    """

    rewards: Tensor
    group_ids: Tensor
    sample_ids: Tensor
    scores: Tensor


class Algorithm(Protocol):
    """One file each in hpcrl/algorithms; built from its section of the configuration."""

    needs_entropy: bool  # entropy with gradients in the loss

    def advantages(self, batch: Batch, table: RewardTable, all_sum: AllSum) -> Stats:
        """Fill batch.advantages and batch.returns [T] in place. Collective over the ranks of all_sum."""

    def policy_loss(self, logprobs: Tensor, entropy: Tensor | None, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        """A LossFn (engines/train/base.py)."""
