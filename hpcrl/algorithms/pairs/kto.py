"""KTO."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.algorithms.pairs.spec import DPOConfig


def kto(ratios: Tensor, chosen: Tensor, kl: float, own: DPOConfig) -> Tensor:
    """float32 [B]: w (1 - sigmoid(beta (r - kl))) of good answers and w' (1 - sigmoid(beta (kl - r))) of bad ones, with
    log-ratios r of whole answers, float32 [B], bool [B] `chosen`, w = desirable_weight and w' = undesirable_weight
    (arXiv 2402.01306, equations 7 and 8)."""
    sign = chosen.to(ratios.dtype) * 2 - 1
    weights = torch.where(chosen, own.desirable_weight, own.undesirable_weight)
    return weights * (1 - torch.sigmoid(own.scale * sign * (ratios - kl)))
