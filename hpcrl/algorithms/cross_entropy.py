"""The objective of supervised fine-tuning: token-mean cross entropy on the tokens of the loss mask."""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.metrics.stats import Stat, Stats
from hpcrl.rollout.batch import Batch, Norms


class CrossEntropy(Objective):
    """-sum of log-probs at temperature 1 over the tokens of the loss mask / norms.tokens."""

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        """See Objective."""
        total = -(outputs.logprobs * batch.loss_mask).sum()
        count = float(batch.loss_mask.sum())
        return total / norms.tokens, {"sft/loss": Stat(float(total.detach()), count)}
