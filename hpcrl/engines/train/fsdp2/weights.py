"""The weights of a model under their names: whole, or the rows that a rank holds."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hpcrl.spec.weights import Held


class NamedWeights:
    """The parameters in the order of state_dict(), each tied one once, under its first name."""

    def __init__(self, hf: PreTrainedModel):
        self._hf = hf
        first: dict[int, str] = {}
        for name, tensor in hf.state_dict(keep_vars=True).items():
            first.setdefault(id(tensor), name)
        self.names = list(first.values())

    def __getitem__(self, name: str) -> Tensor:
        # Looked up each time: FSDP puts gathered parameters in the place of shards.
        return cast(Tensor, operator.attrgetter(name)(self._hf))

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters as they are now."""
        return ((name, self[name]) for name in self.names)

    def layout(self, num_ranks: int) -> list[Held]:
        """See TrainEngine.weight_layout: FSDP2 divides the rows of every parameter."""
        found = []
        for name, tensor in self.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            if isinstance(tensor, DTensor):
                found.append(Held.rows(name, dtype, tensor.shape, num_ranks))
            else:
                found.append(Held.whole(name, dtype, tensor.shape, range(num_ranks)))
        return found

    def held(self) -> Iterator[Tensor]:
        """See TrainEngine.held_weights. No collective: the shards as they are."""
        shards = (local(tensor).detach() for _, tensor in self.items())
        return (shard for shard in shards if shard.numel())


def local(tensor: Tensor) -> Tensor:
    """A rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of the whole tensor, converted before it is gathered. Collective if it is sharded."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1:
        return cast(DTensor, tensor.detach().to(dtype)).full_tensor()
    # A copy: FSDP frees gathered parameters when it reshards, even if they are still referenced.
    return local(tensor).detach().to(dtype, copy=True)
