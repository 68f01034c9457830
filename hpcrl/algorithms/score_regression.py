"""The objective of reward models on answers with scores: the mean squared error over answers and heads, as for
transformers' models with problem_type=regression."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.algorithms.scored_values import reward_stats, scored_values
from hpcrl.metrics.stats import Stats, stat
from hpcrl.rollout.batch import Batch, Norms


class ScoreRegression(Objective):
    """See the module's docstring."""

    outputs = frozenset({"values"})

    def __init__(self, heads: Sequence[str] = ("LABEL_0",)):
        """`heads` are the names of the model's heads."""
        self.heads = tuple(heads)

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        """See Objective."""
        values, targets = scored_values(outputs, batch)
        errors, absolute = (values - targets).square(), (values - targets).abs()
        several = range(len(self.heads) if values.dim() > 1 else 0)
        return errors.sum() / ((norms.sequences or 1.0) * len(self.heads)), {
            "rm/loss": stat(errors),
            "rm/error": stat(absolute),
            **{f"rm/error/{self.heads[head]}": stat(absolute[:, head]) for head in several},
            **reward_stats(values),
        }
