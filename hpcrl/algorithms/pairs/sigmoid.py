"""DPO."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hpcrl.algorithms.pairs.spec import DPOConfig


def sigmoid(chosen: Tensor, rejected: Tensor, own: DPOConfig) -> Tensor:
    """float32 [P]: -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d), with d = chosen - rejected, both float32 [P],
    and e = label_smoothing (arXiv 2305.18290, equation 7; e: conservative DPO)."""
    logits = own.scale * (chosen - rejected)
    smoothing = own.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)
