"""The objective of process reward models: the binary cross entropy of each step's label, as the mean over all steps of
the mini-batch (arXiv 2305.20050)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.algorithms.scored_values import reward_stats, scored_values
from hpcrl.metrics.stats import Stats, stat
from hpcrl.rollout.batch import Batch, Norms


class StepLabels(Objective):
    """See the module's docstring. A step counts as right if its value is positive exactly if its label is true."""

    outputs = frozenset({"values"})

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        """See Objective."""
        values, labels = scored_values(outputs, batch)
        losses = binary_cross_entropy_with_logits(values, labels, reduction="none")
        return losses.sum() / (norms.tokens or 1.0), {
            "rm/loss": stat(losses),
            "rm/accuracy": stat(((values > 0) == (labels > 0.5)).float()),
            **reward_stats(values),
        }
