"""Supervised fine-tuning: token-mean cross entropy on the tokens of the loss mask."""

from __future__ import annotations

from torch import Tensor

from hpcrl.metrics.stats import Stat, Stats
from hpcrl.rollout.batch import Batch, Norms


def sft_loss(logprobs: Tensor, entropy: Tensor | None, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
    """A LossFn (engines/train/base.py): -sum of log-probs over masked tokens / norms.tokens."""
    total = -(logprobs * batch.loss_mask).sum()
    count = float(batch.loss_mask.sum())
    return total / norms.tokens, {"sft/loss": Stat(float(total.detach()), count)}
