"""ORPO."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcrl.algorithms.pairs.spec import DPOConfig

LOG_HALF = -0.6931471805599453


def orpo(chosen: Tensor, rejected: Tensor, own: DPOConfig) -> Tensor:
    """float32 [P]: -beta log sigmoid(log odds(chosen) - log odds(rejected)) of mean log-probs per token, float32 [P];
    odds(p) = p / (1 - p) (arXiv 2403.07691, equations 4 and 7; its cross-entropy term is sft_weight)."""
    log_odds = (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))
    return -own.scale * F.logsigmoid(log_odds)


def _log_of_rest(logp: Tensor) -> Tensor:
    """log(1 - exp(logp)), accurate near 0 and near 1: each form gets only values at which its gradient is finite."""
    small = logp < LOG_HALF
    of_small, of_large = logp.clamp(max=LOG_HALF), logp.clamp(min=LOG_HALF, max=-1e-7)
    return torch.where(small, torch.log1p(-torch.exp(of_small)), torch.log(-torch.expm1(of_large)))
