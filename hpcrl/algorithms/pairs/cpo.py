"""CPO."""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.pairs.sigmoid import sigmoid
from hpcrl.algorithms.pairs.spec import DPOConfig


def cpo(chosen: Tensor, rejected: Tensor, own: DPOConfig) -> Tensor:
    """float32 [P]: DPO's loss of log-probs, float32 [P], instead of ratios to a reference (arXiv 2401.08417, equation
    3; its cross-entropy term is sft_weight)."""
    return sigmoid(chosen, rejected, own)
