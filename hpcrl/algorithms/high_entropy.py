"""A policy loss for only the tokens with the highest entropy (arXiv 2506.01939).

The tokens are chosen once per step, over all ranks, by the entropies of the policy before the step, so the choice
depends neither on micro-batches nor on ranks. TRL chooses in each micro-batch, by the current policy.
"""

from __future__ import annotations

import torch

from hpcrl.algorithms.interface import AllSum, required
from hpcrl.algorithms.selection import largest, token_numbers
from hpcrl.algorithms.token_losses import surrogate_tokens
from hpcrl.metrics.stats import Stats, stat
from hpcrl.rollout.batch import Batch
from hpcrl.spec.divergence import Divergence


def choose_high_entropy(share: float, batch: Batch, all_sum: AllSum, divergence: Divergence | None = None) -> Stats:
    """Fill batch.high_entropy, bool [T]: marks 1 + floor(share (M - 1)) of all ranks' M model tokens that have a
    surrogate (hpcrl.algorithms.token_losses), as many as are at or above TRL's quantile 1 - share. Returns statistics
    to log. Collective over the ranks of all_sum."""
    index = surrogate_tokens(batch, divergence)
    entropies = required(batch, "old_entropies", "entropy_share below 1")[index]
    count = int(all_sum(torch.tensor([len(index)])))
    coefficients = token_numbers(batch.row_ids[index], batch.sample_ids)
    chosen = largest(entropies, coefficients, 1 + int(share * (count - 1)), all_sum)
    batch.high_entropy = torch.zeros_like(batch.loss_mask).index_copy(0, index, chosen)
    return {"actor/high_entropy/*": stat(entropies, chosen)}
