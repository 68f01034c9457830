"""The critic's objective: the squared error of its values, with PPO's value clip.

    loss = 1/2 mean max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

The mean is over the mini-batch's model tokens, weighted by row. R: returns of the advantage estimator;
V_old: the values before the step; c: critic.value_clip. As in OpenAI's PPO2 (baselines), ROLL and verl.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.algorithms.interface import Objective, Outputs, model_tokens, required
from hpcrl.metrics.stats import Stat, Stats
from hpcrl.rollout.batch import Batch, Norms


class ValueLoss(Objective):
    """See the module's docstring. Takes as many optimizer steps as the policy's objective."""

    reads = frozenset({"values", "returns"})
    outputs = frozenset({"values"})

    def __init__(self, value_clip: float | None, num_epochs: int = 1, num_mini_batches: int = 1):
        self.value_clip, self.num_epochs, self.num_mini_batches = value_clip, num_epochs, num_mini_batches

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        """See Objective."""
        index = model_tokens(batch)
        weights = batch.weights[batch.row_ids[index]]
        old = required(batch, "values", "the value loss")[index]
        returns = required(batch, "returns", "the value loss")[index]
        assert outputs.values is not None, "the engine computes values"
        values = outputs.values[index]
        errors = (values - returns).square()
        clipped, worst = torch.zeros_like(errors), errors
        if self.value_clip is not None:
            bounded = (values.clamp(old - self.value_clip, old + self.value_clip) - returns).square()
            worst, clipped = torch.maximum(errors, bounded), (bounded > errors).float()
        total = 0.5 * (weights * worst).sum()
        sums = [total, (weights * values).sum(), (weights * errors).sum(), (weights * clipped).sum(), weights.sum()]
        loss, predicted, error, num_clipped, count = torch.stack([value.detach().double() for value in sums]).tolist()
        return total / (norms.tokens or 1.0), {
            "critic/loss": Stat(loss, count),
            "critic/vpred": Stat(predicted, count),
            "critic/error": Stat(error, count),
            "critic/clipfrac": Stat(num_clipped, count),
        }
