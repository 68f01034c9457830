"""The objective of reward models on pairs of answers, after Bradley and Terry (1952).

    loss = mean over pairs of -log sigmoid(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2

margin: of the row, 0 without one (Llama 2, arXiv 2307.09288); c: rm.center_coef (arXiv 2312.09244). As in TRL's
RewardTrainer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.algorithms.scored_values import reward_stats, scored_values
from hpcrl.metrics.stats import Stats, stat
from hpcrl.rollout.batch import Batch, Norms


class BradleyTerry(Objective):
    """See the module's docstring. A pair counts as right if its chosen answer has the higher score."""

    outputs = frozenset({"values"})
    compares_rows = True

    def __init__(self, center_coef: float = 0.0):
        self.center_coef = center_coef

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        """See Objective. ValueError if the rows are not pairs in the order chosen, rejected."""
        expected = torch.arange(batch.num_sequences, device=batch.group_ids.device) % 2 == 0
        if batch.chosen is None or not batch.chosen.equal(expected):
            raise ValueError("the rows of the batch are not pairs of a chosen and a rejected answer")
        values, targets = scored_values(outputs, batch)
        chosen, rejected = values[::2], values[1::2]
        losses = -logsigmoid(chosen - rejected - targets[::2]) + self.center_coef * (chosen + rejected).square()
        return losses.sum() / (norms.sequences / 2 or 1.0), {
            "rm/loss": stat(losses),
            "rm/accuracy": stat((chosen > rejected).float()),
            "rm/margin": stat(chosen - rejected),
            **reward_stats(values),
        }
