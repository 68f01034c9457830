"""The objective of reward models on answers with scores: the mean squared error, as for transformers' models with one
label (problem_type=regression)."""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.algorithms.scored_values import reward_stats, scored_values
from hpcrl.metrics.stats import Stats, stat
from hpcrl.rollout.batch import Batch, Norms


class ScoreRegression(Objective):
    """See the module's docstring."""

    outputs = frozenset({"values"})

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        """See Objective."""
        values, targets = scored_values(outputs, batch)
        errors = (values - targets).square()
        return errors.sum() / (norms.sequences or 1.0), {
            "rm/loss": stat(errors),
            "rm/error": stat((values - targets).abs()),
            **reward_stats(values),
        }
