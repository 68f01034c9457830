"""The routers' bias per expert, which balances the experts' load without a loss (arXiv 2408.15664)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def moved_biases(biases: Tensor, counts: Tensor, rate: float, group: Any = None) -> Tensor:
    """float32 [layers, E]: biases after a step. An expert's bias grows by `rate` if it got fewer of the mini-batch's
    tokens than the average, and shrinks by `rate` if it got more. Collective over `group` (None: the default group),
    over which counts are summed, float32 [layers, E]."""
    counts = counts.clone()
    dist.all_reduce(counts, group=group)
    return biases + rate * (counts.mean(-1, keepdim=True) - counts).sign()
