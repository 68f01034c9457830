"""A model's weights by name, unsharded or as a rank's shards."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hpcrl.comm.weight_checksums import shard_checksums
from hpcrl.engines.train.fsdp2.device_mesh import ParallelMesh
from hpcrl.engines.train.fsdp2.exchange import stack
from hpcrl.engines.train.fsdp2.lora import Adapters
from hpcrl.spec.lora import A, B, adapted
from hpcrl.spec.weight_layout import RequiredSlices, TensorShards, full_slice


class NamedWeights:
    """The parameters in the order of state_dict(), each tied weight once, under its first name.

    Attributes:
        names: The trained parameters: all_names or, with adapters, only the adapters' parameters and a value head's.
        adapters_of: If generators get merged weights, maps a matrix with an adapter to the names of the adapter's two.
        published: `names` or, if generators get merged weights, the names of a model without adapters.
        split_dims: Maps a tensor's name to the dimension that is split over tensor- or expert-parallel ranks.
    """

    def __init__(
        self, hf: PreTrainedModel, mesh: ParallelMesh, split_dims: Mapping[str, int], adapters: Adapters | None = None
    ):
        self._hf, self._mesh, self.split_dims, self._adapters = hf, mesh, split_dims, adapters
        first: dict[int, str] = {}
        tensors = hf.state_dict(keep_vars=True)
        for name, tensor in tensors.items():
            first.setdefault(id(tensor), name)
        self.all_names = list(first.values())
        self.names = [name for name in self.all_names if tensors[name].requires_grad] if adapters else self.all_names
        self.published, self.adapters_of = self.names, dict[str, tuple[str, str]]()
        if adapters is not None and adapters.config.are_merged:
            self.published = self.frozen_names
            of_first = (name for name in self.names if name.endswith(A))
            self.adapters_of = {adapted(name): (name, name.removesuffix(A) + B) for name in of_first}

    def __getitem__(self, name: str) -> Tensor:
        # Looked up each time, because FSDP replaces shards by gathered parameters.
        return cast(Tensor, operator.attrgetter(name)(self._hf))

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """The trained parameters, sharded or gathered."""
        return ((name, self[name]) for name in self.names)

    def fingerprint(self, earlier: bool = False) -> str:
        """A hash of the frozen weights' bits, equal for any number of ranks. With `earlier`, that of earlier versions,
        which took buffers for split, so that it depended on the ranks; empty if a rank would have no part of a buffer:
        earlier versions had none then. Collective."""
        frozen = self.frozen_names
        layout = self._layout(frozen, earlier)
        buffers = [held for held in layout if not isinstance(self[held.name], nn.Parameter)]
        if any(held.part_of(rank) is None for held in buffers for rank in range(self._mesh.size)):
            return ""
        shards = (local(self[name]).detach() for name in frozen)
        return fingerprint(layout, (shard for shard in shards if shard.numel()))

    @property
    def frozen_names(self) -> list[str]:
        """Names of the weights for which adapters are trained."""
        return [name for name in self.all_names if name not in set(self.names)]

    def layout(self) -> list[TensorShards]:
        """See TrainEngine.weight_layout."""
        return [self.as_merged(held, self[self.names[0]].dtype) for held in self._layout(self.published)]

    def as_merged(self, held: TensorShards, dtype: torch.dtype) -> TensorShards:
        """A published tensor's entry from the entry of a parameter: matrices that are merged with their adapters have
        their dtype and change."""
        if held.name not in self.adapters_of:
            return held
        return msgspec.structs.replace(held, dtype=str(dtype).removeprefix("torch."), frozen=False)

    def _layout(self, names: Sequence[str], buffers_split: bool = False) -> list[TensorShards]:
        found = []
        for name in names:
            tensor = self[name]
            dim, shape = self.split_dims.get(name), list(tensor.shape)
            dtype = str(tensor.dtype).removeprefix("torch.")
            if not isinstance(tensor, nn.Parameter) and not (buffers_split and shape):  # every rank has the whole
                found.append(TensorShards.unsharded(name, dtype, shape, range(self._mesh.size)))
                continue
            if dim is not None:
                shape[dim] *= self._mesh.num_parts
            shards = self._mesh.shards_of(name, dtype, shape, dim)
            found.append(msgspec.structs.replace(shards, frozen=is_frozen(tensor)))
        return found

    def full_tensor(self, name: str, dtype: torch.dtype, merge: bool = False) -> Tensor:
        """A copy of a full parameter, or with `merge` of a published weight, converted before it is gathered.
        Collective if it is sharded or split."""
        return self.from_parts(name, full_tensor(self.merged(name) if merge else self[name], dtype))

    @torch.no_grad()
    def merged(self, name: str) -> Tensor:
        """A published weight, which is merged with its adapter if it has one, in the adapter's dtype; sharded as the
        parameter. Collective over its shards if it has an adapter."""
        matrix = self[name]
        if name not in self.adapters_of:
            return matrix
        assert self._adapters is not None
        which, rows = self.adapters_of[name], slice(None)
        if isinstance(matrix, DTensor):
            box = self._layout([name])[0].part_of(self._mesh.rank)
            rows = slice(*box[0]) if box is not None else slice(0)
        with torch.inference_mode(False):  # see full_tensor
            first, second = (full_tensor(self[each], self[each].dtype) for each in which)
            own = self._adapters.merge_rows(self._hf, which[0], local(matrix).detach(), first, second, rows)
            if not isinstance(matrix, DTensor):
                return own
            layout = matrix.device_mesh, matrix.placements
            return DTensor.from_local(own, *layout, run_check=False, shape=matrix.shape, stride=matrix.stride())

    def from_parts(self, name: str, part: Tensor) -> Tensor:
        """A full tensor from tensor- or expert-parallel ranks' parts; others are unchanged. Collective over them."""
        dim = self.split_dims.get(name)
        return part if dim is None else torch.cat(list(stack(part, self._mesh.part_ranks)), dim)

    def local_shards(self) -> Iterator[Tensor]:
        """See TrainEngine.local_shards. Collective if adapters are merged; else the shards as they are."""
        shards = (local(self.merged(name)).detach() for name in self.published)
        return (shard for shard in shards if shard.numel())


def fingerprint(layout: Sequence[TensorShards], held: Iterable[Tensor], order: Sequence[str] = ()) -> str:
    """A hash of the weights' bits, which does not depend on their split. `held` are this rank's parts, on one device.
    `order` are the names in another order than the layout's, which then does not matter. Collective."""
    needs = [[RequiredSlices("", (full_slice(whole.shape),)) for whole in layout]]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sums = shard_checksums(dist.get_rank(), layout, needs, held).to(device)
    dist.all_reduce(sums)
    if order:
        places = {whole.name: place for place, whole in enumerate(layout)}
        sums = sums[:, [places[name] for name in order]]
    return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()[:16]


def is_frozen(tensor: Tensor) -> bool:
    """Whether this is a parameter without gradients. Buffers may change during training."""
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def local(tensor: Tensor) -> Tensor:
    """A rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of the full tensor, converted before it is gathered. Collective if it is sharded."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1:
        mesh = tensor.device_mesh
        divided = [(axis, placement) for axis, placement in enumerate(tensor.placements) if placement.is_shard()]
        with torch.inference_mode(False):  # a generator draws tensors in inference mode, where no DTensor can be made
            if mesh.device_type == "cpu" and len(divided) == 1 and divided[0][1].is_shard(0):
                axis = divided[0][0]
                return _from_rows(tensor, dtype, mesh.get_group(axis), mesh.get_local_rank(axis))
            return cast(DTensor, tensor.detach().to(dtype)).full_tensor()
    # A copy, because FSDP frees gathered parameters when it reshards, even if they are still referenced.
    return local(tensor).detach().to(dtype, copy=True)


def _from_rows(tensor: DTensor, dtype: torch.dtype, group: dist.ProcessGroup, rank: int) -> Tensor:
    """The full tensor, whose rows are split over a gloo group. Each rank broadcasts its rows directly into the result,
    which costs less than gloo's all-gather."""
    whole = torch.empty(tensor.shape, dtype=dtype)
    parts = [part for part in whole.chunk(group.size()) if part.numel()]
    if rank < len(parts):
        parts[rank].copy_(local(tensor).detach())
    for work in [dist.broadcast(part, group=group, group_src=i, async_op=True) for i, part in enumerate(parts)]:
        work.wait()
    return whole
