"""Muon, with the scale and the weight decay of arXiv 2502.16982."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from hpcrl.engines.train.fsdp2.optimizer import ForMatrices
from hpcrl.engines.train.fsdp2.weights import full_tensor, local

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
SCALE = 0.2
"""Root mean square of AdamW's updates. Muon's updates are scaled to it, so both can use the same learning rate."""


def orthogonalized(matrices: Tensor) -> Tensor:
    """float [..., rows, columns]: each matrix with singular values near one, by Newton-Schulz iterations."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    found = matrices.mT if is_tall else matrices
    found = found / found.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    first, third, fifth = COEFFICIENTS
    for _ in range(STEPS):
        gram = found @ found.mT
        found = first * found + (third * gram + fifth * gram @ gram) @ found
    return found.mT if is_tall else found


class Muon(ForMatrices):
    """The Muon optimizer. A sharded matrix is gathered and orthogonalized on every rank."""

    @staticmethod
    def takes(parameter: Tensor) -> bool:
        """See ForMatrices. The convolution of a vision tower's patches is no stack of matrices."""
        return parameter.ndim <= 3

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, rate, dtype = self.state[parameter], group["lr"], group["dtype"]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        gradient, momentum = local(parameter.grad), local(state["momentum"])
        momentum.lerp_(gradient, 1 - MOMENTUM)
        direction = orthogonalized(_whole(parameter, gradient.lerp(momentum, MOMENTUM), dtype))
        scale = SCALE * max(parameter.shape[-2:]) ** 0.5
        own = local(parameter)
        own.mul_(1 - rate * group["weight_decay"]).add_(_part(parameter, direction).to(own.dtype), alpha=-rate * scale)


def _whole(parameter: Tensor, part: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(parameter, DTensor):
        return part.to(dtype)
    mesh, placements = parameter.device_mesh, parameter.placements
    whole = DTensor.from_local(part, mesh, placements, shape=parameter.shape, stride=parameter.stride())
    return full_tensor(whole, dtype)


def _part(parameter: Tensor, whole: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, parameter.placements
    return local(distribute_tensor(whole, mesh, placements, src_data_rank=None))
