"""Muon for matrices, AdamW for the rest (arXiv 2502.16982)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from hpcrl.config import TrainerConfig
from hpcrl.engines.train.fsdp2.weights import local, whole_copy

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
SCALE = 0.2
"""The root mean square of AdamW's updates, which those of Muon get, so that both take the same learning rate."""


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


def in_layers(hf: PreTrainedModel) -> Iterator[Tensor]:
    """The parameters of the decoder but its embeddings: neither the vocabulary projection nor a critic's head."""
    for module in hf.base_model.modules():
        if not isinstance(module, nn.Embedding):
            yield from module.parameters(recurse=False)


class Muon(torch.optim.AdamW):
    """A parameter of `matrices` is a matrix, or a stack of them, such as those of all experts. A divided one is
    gathered, and orthogonalized on every rank. Weight decay is on matrices only, as with AdamW."""

    def __init__(
        self, matrices: Sequence[Tensor], groups: Sequence[dict[str, Any]], config: TrainerConfig, dtype: torch.dtype
    ):
        """groups: the other parameters, for AdamW. dtype: in which matrices are orthogonalized."""
        self._dtype = dtype
        muon = {"params": [*matrices], "weight_decay": config.weight_decay, "muon": True}
        every = [muon, *({**group, "muon": False} for group in groups)]
        super().__init__(every, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Collective over the ranks that share parameters."""
        assert closure is None, "gradients are there"
        every = self.param_groups
        for group in (group for group in every if group["muon"]):
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                self._update(parameter, group["lr"], group["weight_decay"])
        self.param_groups = [group for group in every if not group["muon"]]
        try:
            super().step()
        finally:
            self.param_groups = every

    def _update(self, parameter: Tensor, rate: float, decay: float) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        gradient, momentum = local(parameter.grad), local(state["momentum"])
        momentum.lerp_(gradient, 1 - MOMENTUM)
        direction = orthogonalized(self._whole(parameter, gradient.lerp(momentum, MOMENTUM)))
        scale = SCALE * max(parameter.shape[-2:]) ** 0.5
        own = local(parameter)
        own.mul_(1 - rate * decay).add_(self._part(parameter, direction).to(own.dtype), alpha=-rate * scale)

    def _whole(self, parameter: Tensor, part: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return part.to(self._dtype)
        mesh, placements = parameter.device_mesh, parameter.placements
        whole = DTensor.from_local(part, mesh, placements, shape=parameter.shape, stride=parameter.stride())
        return whole_copy(whole, self._dtype)

    @staticmethod
    def _part(parameter: Tensor, whole: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return whole
        mesh, placements = parameter.device_mesh, parameter.placements
        return local(distribute_tensor(whole, mesh, placements, src_data_rank=None))
