"""Adafactor (arXiv 1804.04235) with the learning rate of AdamW: without relative steps, scaled parameters and momentum,
as transformers' Trainer uses it."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from hpcrl.engines.train.fsdp2.optimizer import ForMatrices
from hpcrl.engines.train.fsdp2.weights import local

DECAY = 0.8
"""In step t, second moments keep 1 - t ** -DECAY of their value."""
EPSILON = 1e-30
CLIP = 1.0
"""Maximum root mean square of an update in units of the learning rate."""


class Adafactor(ForMatrices):
    """Second moments of a matrix are the product of a vector for its rows and one for its columns; each matrix of a
    stack has its own. The step sums columns over the ranks that share a matrix by rows."""

    @staticmethod
    def takes(parameter: Tensor) -> bool:
        """See ForMatrices. The convolution of a vision tower's patches is no stack of matrices."""
        return parameter.ndim <= 3

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        own, gradient = local(parameter), local(cast(Tensor, parameter.grad)).float()
        state = self.state[parameter]
        if not state:
            state |= _empty_state(parameter)
        state["step"] += 1
        share, squares = state["step"].item() ** -DECAY, gradient.square() + EPSILON
        rows, columns = local(state["exp_avg_sq_row"]), local(state["exp_avg_sq_col"])
        rows.lerp_(squares.mean(-1), share)
        sharing = _sharing(parameter)
        sums = torch.cat([squares.sum(-2), rows.sum(-1, keepdim=True)], -1)
        if parameter.ndim == 2:
            _sum_over(sharing, sums)
        sums /= parameter.shape[-2]
        columns.lerp_(sums[..., :-1], share)
        update = gradient * (rows / sums[..., -1:]).rsqrt()[..., None] * columns.rsqrt()[..., None, :]
        square = update.square().sum()
        _sum_over(sharing, square)
        update /= ((square / parameter.numel()).sqrt() / CLIP).clamp(min=1.0)
        own.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(own.dtype), alpha=-group["lr"])


def _empty_state(parameter: Tensor) -> dict[str, Tensor]:
    """The step, and float32 second moments of rows and columns. A matrix whose rows are shared has its columns' on
    every rank."""
    own, shape = local(parameter), parameter.shape
    rows = torch.zeros(own.shape[:-1], dtype=torch.float32, device=own.device)
    columns = torch.zeros((*own.shape[:-2], shape[-1]), dtype=torch.float32, device=own.device)
    if isinstance(parameter, DTensor):
        mesh, split = parameter.device_mesh, parameter.placements
        common = split if len(shape) == 3 else [Replicate()] * mesh.ndim
        rows = _sharded(rows, mesh, split, shape[:-1])
        columns = _sharded(columns, mesh, common, torch.Size((*shape[:-2], shape[-1])))
    step = torch.zeros((), dtype=torch.float32)
    return {"step": step, "exp_avg_sq_row": rows, "exp_avg_sq_col": columns}


def _sharded(part: Tensor, mesh: Any, placements: Any, shape: torch.Size) -> Tensor:
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
    return cast(Tensor, whole)


def _sharing(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks that share a parameter; None if no others do."""
    if not isinstance(parameter, DTensor):
        return None
    axes = [axis for axis, placement in enumerate(parameter.placements) if placement.is_shard()]
    return parameter.device_mesh.get_group(axes[0]) if axes else None


def _sum_over(group: dist.ProcessGroup | None, values: Tensor) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, group=group)
