"""Owned and required shards of weights: the slices of each tensor, as training and generation engines declare them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

CHANNELS = 8
"""Maximum channels of an NCCL communicator for new weights. Each channel uses a thread block of the GPU and buffers;
NCCL expects 14 GB/s per channel between nodes. A trainer rank is in one communicator for each replica."""

TensorSlice = tuple[tuple[int, int], ...]
"""A slice of a tensor: (first, last + 1) in each dimension."""


class TensorShards(msgspec.Struct, frozen=True, array_like=True):
    """A tensor under its HF name, and the ranks of a training engine that hold its parts.

    Args:
        dtype: torch's name of the dtype.
        parts: Disjoint slices that cover the tensor, each with the ranks that hold it; a rank holds at most one slice.
        frozen: Whether training never changes the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[TensorSlice, tuple[int, ...]], ...]
    frozen: bool = False

    @classmethod
    def unsharded(cls, name: str, dtype: str, shape: Sequence[int], ranks: Sequence[int]) -> TensorShards:
        """A tensor that each of these ranks holds."""
        return cls(name, dtype, tuple(shape), ((full_slice(shape), tuple(ranks)),))

    @classmethod
    def rows(cls, name: str, dtype: str, shape: Sequence[int], num_ranks: int) -> TensorShards:
        """A tensor whose rows are divided into equal blocks, one for each rank; the last ranks get fewer or none."""
        num_rows, rest = shape[0], full_slice(shape[1:])
        block = max(1, -(-num_rows // num_ranks))
        bounds = [(first, min(first + block, num_rows)) for first in range(0, num_rows, block)]
        return cls(name, dtype, tuple(shape), tuple(((rows, *rest), (i,)) for i, rows in enumerate(bounds)))

    def of(self, ranks: Sequence[int]) -> TensorShards:
        """The same tensor with ranks[i] in place of rank i."""
        parts = tuple((box, tuple(ranks[i] for i in holders)) for box, holders in self.parts)
        return msgspec.structs.replace(self, parts=parts)

    def part_of(self, rank: int) -> TensorSlice | None:
        """The slice that a rank holds; None if it holds none."""
        return next((box for box, holders in self.parts if rank in holders), None)


class RequiredSlices(msgspec.Struct, frozen=True, array_like=True):
    """Required shard of a generator rank: disjoint slices of a tensor, and the dtype to keep (empty: the trainer's)."""

    dtype: str
    slices: tuple[TensorSlice, ...]


_BLOCK = re.compile(r".*?\.\d+\.[^.]+(?=\.[^.]+\.)")
"""In a weight's name, a layer's attention, MLP or the like."""


def keepable(layout: Sequence[TensorShards]) -> frozenset[str]:
    """Names of the frozen tensors that generators may keep in an update. Generators may join matrices of a layer's
    attention, or of its MLP, so none of these is kept unless all are frozen."""
    blocks: dict[str, list[TensorShards]] = {}
    for held in layout:
        match = _BLOCK.match(held.name)
        blocks.setdefault(match[0] if match else held.name.rpartition(".")[0], []).append(held)
    return frozenset(held.name for block in blocks.values() for held in block if all(each.frozen for each in block))


def full_slice(shape: Sequence[int]) -> TensorSlice:
    """The slice that covers a whole tensor."""
    return tuple((0, size) for size in shape)


def intersection(one: TensorSlice, other: TensorSlice) -> TensorSlice | None:
    """The intersection of two slices of a tensor; None if it is empty."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(first < last for first, last in shared) else None


def count(box: TensorSlice) -> int:
    """Number of elements in a slice."""
    return math.prod(last - first for first, last in box)


def all_weights(config: Any, model: Any, name: str, shape: Sequence[int], index: int, num_ranks: int) -> RequiredSlices:
    """The required slices of an engine that reads every tensor on every rank, and keeps it in generator.dtype."""
    return RequiredSlices(config.generator.dtype, (full_slice(shape),))
