"""Robust DPO."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hpcrl.algorithms.pairs.spec import DPOConfig


def robust(chosen: Tensor, rejected: Tensor, own: DPOConfig) -> Tensor:
    """float32 [P]: (-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2 e), with d = chosen - rejected,
    both float32 [P], and e = label_smoothing (arXiv 2403.00409, equation 12)."""
    logits, swapped = own.scale * (chosen - rejected), own.label_smoothing
    return (swapped * F.logsigmoid(-logits) - (1 - swapped) * F.logsigmoid(logits)) / (1 - 2 * swapped)
