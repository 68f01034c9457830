"""The objective of tests.e2e.anchored_sft; on the ranks only, since it imports torch."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import torch
from torch import Tensor

from hpcrl.algorithms.functional import kl_divergence
from hpcrl.algorithms.interface import Objective, Outputs, required
from hpcrl.metrics.stats import Stat, Stats
from hpcrl.rollout.batch import Batch, Norms

SEEN = "ANCHORED_SFT_SEEN"
"""Environment variable: the folder for what the loss reads."""


class AnchoredLoss(Objective):
    """The mean of -log p + k3(policy, reference) over the tokens of the loss mask."""

    reads = frozenset({"ref_logprobs"})

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        """See Objective."""
        mask = batch.loss_mask
        reference = required(batch, "ref_logprobs", "the KL term")[mask]
        logprobs = outputs.logprobs[mask]
        kl = kl_divergence(logprobs, reference, "k3")
        seen = {"ids": batch.sample_ids, "starts": batch.cu_seqlens, "tokens": batch.token_ids, "mask": mask}
        torch.save(seen | {"reference": reference}, Path(os.environ[SEEN]) / f"{uuid.uuid4().hex}.pt")
        count = float(mask.sum())
        stats = {"sft/loss": Stat(float(-logprobs.sum()), count), "sft/kl": Stat(float(kl.sum()), count)}
        return (kl - logprobs).sum() / norms.tokens, stats
