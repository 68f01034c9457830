"""Where the weights are and where they must go: the parts of each tensor, as training and generation engines declare
them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

CHANNELS = 8
"""Most channels of an NCCL communicator that carries new weights. Each takes a block of the GPU and buffers, and NCCL
reckons with 14 GB/s of one between nodes; a trainer rank is in one communicator for each replica."""

TensorSlice = tuple[tuple[int, int], ...]
"""A part of a tensor: (first, last + 1) in each dimension."""


class TensorShards(msgspec.Struct, frozen=True, array_like=True):
    """A tensor under its HF name, and the ranks of a training engine that hold its parts.

    parts: disjoint boxes that cover the tensor, each with the ranks that hold it; a rank holds at most one part.
    dtype: as torch names it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[TensorSlice, tuple[int, ...]], ...]

    @classmethod
    def whole(cls, name: str, dtype: str, shape: Sequence[int], ranks: Sequence[int]) -> TensorShards:
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
        """The same with ranks[i] in place of rank i."""
        parts = tuple((box, tuple(ranks[i] for i in holders)) for box, holders in self.parts)
        return TensorShards(self.name, self.dtype, self.shape, parts)

    def part_of(self, rank: int) -> TensorSlice | None:
        """The part that a rank holds."""
        return next((box for box, holders in self.parts if rank in holders), None)


class RequiredSlices(msgspec.Struct, frozen=True, array_like=True):
    """What a rank of a generator replica must get of a tensor: disjoint boxes, and the dtype in which it keeps them
    (empty: the trainer's)."""

    dtype: str
    slices: tuple[TensorSlice, ...]


def full_slice(shape: Sequence[int]) -> TensorSlice:
    """The box that covers a tensor."""
    return tuple((0, size) for size in shape)


def intersection(one: TensorSlice, other: TensorSlice) -> TensorSlice | None:
    """What two boxes of a tensor share; None if that is nothing."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(first < last for first, last in shared) else None


def count(box: TensorSlice) -> int:
    """Numbers in a box."""
    return math.prod(last - first for first, last in box)


def all_weights(config: Any, model: Any, name: str, shape: Sequence[int], index: int, num_ranks: int) -> RequiredSlices:
    """The need of an engine that reads every tensor on every rank, and keeps it in generator.dtype."""
    return RequiredSlices(config.generator.dtype, (full_slice(shape),))
