"""IPO."""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.pairs.spec import DPOConfig


def ipo(chosen: Tensor, rejected: Tensor, own: DPOConfig) -> Tensor:
    """float32 [P]: (chosen - rejected - 1 / (2 beta))^2 of mean log-ratios per token, float32 [P] (arXiv 2310.12036,
    equation 17; the means are those of the authors' experiments, as in TRL)."""
    return (chosen - rejected - 1 / (2 * own.scale)).square()
