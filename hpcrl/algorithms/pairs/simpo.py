"""SimPO."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hpcrl.algorithms.pairs.spec import DPOConfig


def simpo(chosen: Tensor, rejected: Tensor, own: DPOConfig) -> Tensor:
    """float32 [P]: -(1 - e) log sigmoid(x) - e log sigmoid(-x), with x = beta (chosen - rejected) - gamma of mean
    log-probs per token, float32 [P], and e = label_smoothing (arXiv 2405.14734, equation 6)."""
    logits, smoothing = own.scale * (chosen - rejected) - own.gamma, own.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)
