"""The engine's device mesh: copies of the parameters, their shards, sequences and matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hpcrl.engines.train.fsdp2.exchange import Axis, TokenRanks
from hpcrl.engines.train.fsdp2.spec import FSDP2Config, indivisible_heads
from hpcrl.spec.weight_layout import TensorShards


class ParallelMesh:
    """A rank's coordinates: rank = ((replica x shards) + shard) x tensor_parallel + tensor rank. Neighbouring shards
    that have the same rows split the tokens (context parallelism). With expert parallelism, which has none of these,
    rank = shard of experts x expert_parallel + expert rank.

    Attributes:
        mesh: The device mesh for fully_shard, with the dimensions (replicas,) shards.
        split_mesh: The device mesh for fully_shard of tensors that are split over tensor or expert ranks.
        parts: The mesh of one copy, with the dimensions (tensor or expert,) shards. A tensor is split over tensor or
            expert ranks, then over shards.
        num_parts: Number of ranks over which a tensor is split before it is sharded.
        part_ranks: These ranks.
        replicas: The ranks that hold the same part of every tensor.
        experts: The ranks that have parts of a mixture's experts, and different rows.
    """

    def __init__(self, own: FSDP2Config, device: torch.device):
        """Collective over the ranks of the default group."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.num_replicas, self.num_parts = own.replicas, own.tensor_parallel * own.expert_parallel
        self.num_shards = self.size // (own.replicas * self.num_parts)
        self.experts = Axis()
        if own.expert_parallel > 1:
            self.mesh = init_device_mesh(device.type, (self.size,))
            ranks = torch.arange(self.size).view(self.num_shards, self.num_parts).t().contiguous()
            self.parts = DeviceMesh(device.type, ranks, mesh_dim_names=("expert", "shard"))
            self.split_mesh = self.parts["shard"]
            self.experts = Axis(self.parts.get_group("expert"), self.num_parts, self.parts.get_local_rank("expert"))
        elif own.replicas * own.tensor_parallel == 1:
            self.mesh = self.parts = init_device_mesh(device.type, (self.size,))
        else:
            ranks = torch.arange(self.size).view(self.num_replicas, self.num_shards, self.num_parts)
            mesh = DeviceMesh(
                device.type, ranks.transpose(1, 2).contiguous(), mesh_dim_names=("replica", "tensor", "shard")
            )
            self.mesh = mesh["replica", "shard"] if own.replicas > 1 else mesh["shard"]
            self.parts = mesh["tensor", "shard"] if own.tensor_parallel > 1 else mesh["shard"]
        if own.expert_parallel == 1:
            self.split_mesh = self.mesh
        self.replicas = Axis(self.mesh.get_group("replica"), own.replicas) if own.replicas > 1 else Axis()
        self.tokens = TokenRanks(*_axes(self.size, own.tensor_parallel, own.context_parallel))
        self.part_ranks = self.experts if own.expert_parallel > 1 else self.tokens.tensor

    @property
    def num_data_parallel(self) -> int:
        """Number of data-parallel ranks, which are ranks or groups of ranks with their own rows."""
        return self.size // self.tokens.all.size

    def placements(self, dim: int | None) -> tuple[DeviceMesh, list[Placement]]:
        """The mesh of one copy and a tensor's placements on it: split in dimension `dim` over tensor or expert ranks,
        then by rows over shards."""
        shards: list[Placement] = [Shard(0)]
        if dim is None and self.experts.size > 1:  # all ranks are its shards
            return self.mesh, shards
        return self.parts, shards if self.num_parts == 1 else [Replicate() if dim is None else Shard(dim), *shards]

    def as_part_of_whole(self, tensor: Tensor, dim: int | None) -> Tensor:
        """Turn a shard of one tensor or expert rank's part of a tensor, or of its moments, into a shard of the full
        tensor, in the same memory. Other tensors are returned unchanged."""
        if dim is None or not isinstance(tensor, DTensor):
            return tensor
        shape = list(tensor.shape)
        shape[dim] *= self.num_parts
        strides = torch.empty(shape, device="meta").stride()
        whole = DTensor.from_local(
            tensor.to_local(),
            *self.placements(dim),
            run_check=False,
            shape=torch.Size(shape),
            stride=strides,
        )
        return cast(Tensor, whole)

    def shards_of(self, name: str, dtype: str, shape: Sequence[int], dim: int | None) -> TensorShards:
        """Owned shards of a tensor whose parts are split by rows; `shape`: the whole tensor's."""
        if dim is None and self.experts.size > 1:
            return TensorShards.rows(name, dtype, shape, self.size)
        sizes, first = list(shape), dim or 0
        if dim is not None:
            sizes[dim] //= self.num_parts
        rows, parts = TensorShards.rows(name, dtype, sizes, self.num_shards), []
        for part in range(self.num_parts if dim is not None else 1):
            holders = range(self.num_parts) if dim is None else (part,)
            for tensor_slice, (shard,) in rows.parts:
                start, end = (bound + part * sizes[first] for bound in tensor_slice[first])
                parts.append(
                    ((*tensor_slice[:first], (start, end), *tensor_slice[first + 1 :]), self._holders(shard, holders))
                )
        return TensorShards(name, dtype, tuple(shape), tuple(parts))

    def _holders(self, shard: int, parts: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            (replica * self.num_shards + shard) * self.num_parts + part
            for replica in range(self.num_replicas)
            for part in parts
        )


def _axes(size: int, tensor: int, context: int) -> tuple[Axis, Axis, Axis]:
    """The tensor ranks, the context ranks and all ranks of this rank's data-parallel rank. All ranks take part in the
    creation of all groups."""
    groups = torch.arange(size).view(-1, context, tensor)
    matrices = _axis(groups.flatten(0, 1).tolist()) if tensor > 1 else Axis()
    sequences = _axis(groups.transpose(1, 2).flatten(0, 1).tolist()) if context > 1 else Axis()
    if tensor > 1 and context > 1:
        return matrices, sequences, _axis(groups.flatten(1, 2).tolist())
    return matrices, sequences, matrices if tensor > 1 else sequences


def _axis(groups: list[list[int]]) -> Axis:
    mine = Axis()
    for ranks in groups:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = Axis(group, len(ranks), ranks.index(dist.get_rank()))
    return mine


def check_heads(own: FSDP2Config, config: Any) -> None:
    """ValueError if a transformers config's heads cannot be split. Recurrent models may have none."""
    heads = getattr(config, "num_attention_heads", None)
    if own.ranks_of_a_row == 1 or heads is None:
        return
    for problem in indivisible_heads(own, heads, getattr(config, "num_key_value_heads", None) or heads):
        raise ValueError(problem.text)
