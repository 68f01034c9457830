"""The optimizer: AdamW for all parameters, or another optimizer for the layers' matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hpcrl.config import TrainerConfig
from hpcrl.engines.train.fsdp2.model_kind import body_of
from hpcrl.engines.train.fsdp2.spec import SPEC


def make_optimizer(
    hf: PreTrainedModel,
    config: TrainerConfig,
    dtype: torch.dtype,
    is_matrix: Callable[[Tensor], bool],
    idle: Collection[str] = (),
    further: nn.Module | None = None,
) -> torch.optim.AdamW:
    """The configured optimizer for the trained parameters, with weight decay for matrices but not for biases and norms.

    Args:
        dtype: The compute dtype.
        is_matrix: Whether a parameter has at least two dimensions. It gets weight decay, unless it is the biases of a
            layer's experts.
        further: Trained layers outside of `hf`.
        idle: Names of parameters whose gradients are always zero. They get no decay, so they do not change.
    """
    kind: type[torch.optim.AdamW] = SPEC.optimizers[config.optimizer].load()
    takes = kind.takes if issubclass(kind, ForMatrices) else lambda parameter: False
    outside = {} if further is None else dict(further.named_parameters())
    named = [*hf.named_parameters(), *outside.items()]
    biases = {id(p) for name, p in named if name.endswith("bias")}
    still = {id(p) for name, p in hf.named_parameters() if name in idle}
    special = {id(p) for p in (*in_layers(hf), *outside.values()) if is_matrix(p) and takes(p)} - biases - still
    parameters = [p for _, p in named if p.requires_grad]
    rest = [p for p in parameters if id(p) not in special]
    shrinks = {id(p) for p in rest if is_matrix(p)} - still - biases
    decayed = {"weight_decay": config.weight_decay}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if id(p) in special], "special": True, "dtype": dtype, **decayed},
        {"params": [p for p in rest if id(p) in shrinks], **decayed},
        {"params": [p for p in rest if id(p) not in shrinks], "weight_decay": 0.0},
    ]
    groups = [group | {"params": own} for group in groups for own in _by_mesh(group["params"])]
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _by_mesh(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The parameters that are sharded over the same ranks. A fused step takes no others."""
    meshes = [p.device_mesh if isinstance(p, DTensor) else None for p in parameters]
    for mesh in dict.fromkeys(meshes):
        yield [p for p, own in zip(parameters, meshes, strict=True) if own == mesh]


def in_layers(hf: PreTrainedModel) -> Iterator[Tensor]:
    """The decoder's parameters except embeddings, vocabulary projection and a critic's head."""
    for module in body_of(hf).modules():
        if not isinstance(module, nn.Embedding):
            yield from module.parameters(recurse=False)


class ForMatrices(torch.optim.AdamW):
    """A base class of optimizers with an update rule of their own for the layers' matrices. Groups marked `special`
    have matrices, or stacks of matrices such as a layer's experts, and use _update(); other groups use AdamW."""

    @staticmethod
    def takes(parameter: Tensor) -> bool:
        """Whether _update() handles this matrix of a layer; the answer must not depend on the number of ranks."""
        return True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters. Collective over the ranks that share parameters."""
        assert closure is None, "gradients are computed before the step"
        every = self.param_groups
        for group in (group for group in every if group.get("special")):
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                self._update(parameter, group)
        self.param_groups = [group for group in every if not group.get("special")]
        try:
            super().step()
        finally:
            self.param_groups = every

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError
