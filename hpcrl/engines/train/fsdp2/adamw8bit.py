"""AdamW with moments in 8 bits (arXiv 2110.02861), with bitsandbytes' kernels."""

from __future__ import annotations

from typing import Any, cast

import bitsandbytes.functional as bnb
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpcrl.engines.train.fsdp2.optimizer import ForMatrices
from hpcrl.engines.train.fsdp2.spec import BLOCK, MIN_NUMBERS
from hpcrl.engines.train.fsdp2.weights import local

MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))
"""Each moment, and whether it is signed."""


class AdamW8bit(ForMatrices):
    """AdamW whose moments have 8 bits and one scale per block of 256 numbers. Every row begins a new block, so blocks
    do not depend on the number of ranks, which split by rows. If a row's length is not a multiple of 256, the row is
    padded during the update."""

    _maps: tuple[Tensor, ...] = ()

    @staticmethod
    def takes(parameter: Tensor) -> bool:
        """See ForMatrices. Matrices with short rows are left to AdamW, since they would be mostly padding."""
        size = parameter.numel()
        return size >= MIN_NUMBERS and size // parameter.shape[0] >= BLOCK

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        own, gradient = local(parameter), local(cast(Tensor, parameter.grad))
        if not self._maps:
            self._maps = tuple(bnb.create_dynamic_map(signed=signed).to(own.device) for _, signed in MOMENTS)
        state = self.state[parameter]
        if not state:
            state |= _empty_state(parameter)
        state["step"] += 1
        if not own.numel():
            return
        rows, (codes1, codes2), (scales1, scales2) = (
            own.view(own.shape[0], -1),
            *([local(state[name + kind]).view(-1) for name, _ in MOMENTS] for kind in ("", "_scale")),
        )
        filling = -rows.shape[1] % BLOCK
        updated = F.pad(rows, (0, filling)).contiguous()
        bnb.optimizer_update_8bit_blockwise(
            "adam",
            F.pad(gradient.view_as(rows), (0, filling)).contiguous().view(-1),
            updated.view(-1),
            codes1,
            codes2,
            *group["betas"],
            0.0,
            0.0,
            group["eps"],
            int(state["step"].item()),
            group["lr"],
            *self._maps,
            scales1,
            scales2,
            group["weight_decay"],
        )
        if updated.data_ptr() != rows.data_ptr():
            rows.copy_(updated[:, : rows.shape[1]])


def _empty_state(parameter: Tensor) -> dict[str, Tensor]:
    """The step, and for both moments codes (uint8 [rows, columns padded to full blocks]) and scales (float32 [rows,
    blocks]), sharded like the parameter."""
    num_rows = parameter.shape[0]
    blocks = -(-(parameter.numel() // num_rows) // BLOCK)
    state = {"step": torch.zeros((), dtype=torch.float32)}
    for name, _ in MOMENTS:
        state[name] = _zeros_like_rows(parameter, blocks * BLOCK, torch.uint8)
        state[f"{name}_scale"] = _zeros_like_rows(parameter, blocks, torch.float32)
    return state


def _zeros_like_rows(parameter: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    own = local(parameter)
    zeros = torch.zeros(own.shape[0], columns, dtype=dtype, device=own.device)
    if not isinstance(parameter, DTensor):
        return zeros
    shape = torch.Size((parameter.shape[0], columns))
    return cast(
        Tensor,
        DTensor.from_local(
            zeros, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=(columns, 1)
        ),
    )
