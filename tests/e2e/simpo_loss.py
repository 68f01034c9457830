"""The objective of tests/e2e/simpo.py; on the trainers only, since it imports torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.metrics.stats import Stats, stat
from hpcrl.rollout.batch import Batch, Norms


class SimPO(Objective):
    """-log sigmoid(BETA x (mean log-prob of chosen - mean log-prob of rejected) - GAMMA), arXiv 2405.14734, mean over
    pairs."""

    BETA, GAMMA = 2.0, 0.5
    compares_rows = True

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        """See Objective. ValueError if the rows of a pair are not adjacent in the order chosen, rejected."""
        chosen = batch.chosen
        pattern = torch.arange(batch.num_sequences, device=batch.group_ids.device) % 2 == 0
        if chosen is None or not chosen.equal(pattern) or not batch.group_ids[::2].equal(batch.group_ids[1::2]):
            raise ValueError(f"pairs are not whole: {chosen}, {batch.group_ids}")
        sums = outputs.logprobs.new_zeros(batch.num_sequences).index_add(0, batch.row_ids, outputs.logprobs)
        counts = torch.zeros_like(sums).index_add(0, batch.row_ids, batch.loss_mask.to(sums.dtype))
        means = sums / counts
        margins = self.BETA * (means[::2] - means[1::2])
        losses = -torch.nn.functional.logsigmoid(margins - self.GAMMA)
        return losses.sum() / (norms.sequences / 2), {
            "simpo/margin": stat(margins.detach()),
            "simpo/loss": stat(losses),
        }
