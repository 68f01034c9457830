"""The values that a batch of rows for a value head learns, and their statistics."""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.interface import Outputs, required
from hpcrl.metrics.stats import Stats, stat
from hpcrl.rollout.batch import Batch


def scored_values(outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """(values, their targets), float32 [n], or [n, heads] with several heads, of the tokens of the loss mask in
    order."""
    assert outputs.values is not None, "the engine computes values"
    index = batch.loss_mask.nonzero()[:, 0]
    return outputs.values[index], required(batch, "targets", "a reward model")[index]


def reward_stats(values: Tensor) -> Stats:
    """rm/mean_reward, rm/min_reward and rm/max_reward, named as in TRL."""
    return {"rm/*_reward": stat(values)}
