"""Checksums of weights on both sides of an update (check_weights=true).

A tensor's checksum is the sum, modulo 2**64, of each number's bits times an odd factor for its index. So the checksums
of disjoint slices add up to the tensor's checksum, whichever ranks hold the slices, and misplaced numbers are detected.
Zeros of both signs are treated as equal: an engine may compute weights as products with the identity, which lose the
sign.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hpcrl.comm.batched_p2p import Transfer, begin
from hpcrl.comm.weight_plan import arriving_dtype
from hpcrl.comm.weight_transfer import UpdateGroup, inside
from hpcrl.spec.weight_layout import RequiredSlices, TensorShards, TensorSlice, full_slice, intersection

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FACTOR = 0x4A8BE9229ED9BA3A  # even: index times this, plus 1, is odd
CHUNK = 1 << 20  # numbers processed at once; each needs up to 40 bytes


def checksum(part: Tensor, tensor_slice: TensorSlice, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """int64 scalar: the checksum of `part`, a slice of a tensor of this shape, after conversion to `dtype`."""
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for chunk, at in _chunks(part, tensor_slice):
        places = torch.zeros((), dtype=torch.int64, device=part.device)
        for (first, last), size in zip(at, shape, strict=True):
            places = (places * size)[..., None] + torch.arange(first, last, device=part.device)
        converted = chunk.to(dtype or chunk.dtype).contiguous()
        converted = converted.masked_fill(converted == 0, 0)
        total += (converted.view(BITS[converted.element_size()]) * (places * FACTOR + 1)).sum()
    return total


def _chunks(part: Tensor, tensor_slice: TensorSlice) -> Iterator[tuple[Tensor, TensorSlice]]:
    """Cut a slice of a tensor into pieces of at most CHUNK numbers."""
    axis = next((i for i, size in enumerate(part.shape) if size > 1), None)
    if axis is None or part.numel() <= CHUNK:
        yield part, tensor_slice
        return
    step = max(1, CHUNK * part.shape[axis] // part.numel())
    for start in range(0, part.shape[axis], step):
        piece = part.narrow(axis, start, min(step, part.shape[axis] - start))
        first = tensor_slice[axis][0] + start
        yield from _chunks(piece, (*tensor_slice[:axis], (first, first + piece.shape[axis]), *tensor_slice[axis + 1 :]))


def shard_checksums(
    rank: int, layout: Sequence[TensorShards], needs: Sequence[Sequence[RequiredSlices]], weights: Iterable[Tensor]
) -> Tensor:
    """int64 [ranks of a replica, tensors]: what this trainer rank's shards add to the checksum of each replica rank's
    required slices. Only the first of several holders counts a shard. `weights` come from
    TrainEngine.local_shards()."""
    sums = torch.zeros(len(needs), len(layout), dtype=torch.int64)
    own = ((number, held) for number, held in enumerate(layout) if held.part_of(rank) is not None)
    for (number, held), tensor in zip(own, weights, strict=True):
        tensor_slice, holders = next(part for part in held.parts if rank in part[1])
        if holders[0] != rank:
            continue
        for index, need in enumerate(needs):
            dtype = getattr(torch, arriving_dtype(held, need[number]))
            for wanted in need[number].slices:
                if (shared := intersection(tensor_slice, wanted)) is not None:
                    part = inside(tensor.detach(), shared, tensor_slice)
                    sums[index, number] += checksum(part, shared, held.shape, dtype).cpu()
    return sums


class LoadedSums:
    """Checksums of a generator rank's required slices, by tensor name."""

    def __init__(self, layout: Sequence[TensorShards], needs: Sequence[RequiredSlices]):
        self._layout, self._needs = layout, needs
        self._numbers = {held.name: number for number, held in enumerate(layout)}
        self.sums = torch.zeros(len(layout), dtype=torch.int64)

    def noting(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors; afterwards `sums` holds their checksums instead of earlier ones."""
        for name, tensor in named:
            number = self._numbers[name]
            held, need, self.sums[number] = self._layout[number], self._needs[number], 0
            dtype = getattr(torch, arriving_dtype(held, need))
            for tensor_slice in need.slices:
                part = inside(tensor, tensor_slice, full_slice(held.shape))
                self.sums[number] += checksum(part, tensor_slice, held.shape, dtype).cpu()
            yield name, tensor

    def keep(self, other: LoadedSums, names: Collection[str]) -> None:
        """Use the other checksums of these tensors."""
        numbers = [self._numbers[name] for name in names]
        self.sums[numbers] = other.sums[numbers]

    def differing(self, expected: Tensor) -> list[str]:
        """The names of tensors whose checksum differs."""
        return [self._layout[number].name for number in (self.sums != expected).nonzero()[:, 0].tolist()]


def add_sums(channel: UpdateGroup, rank: int, trainers: Sequence[int], own: Tensor) -> Tensor:
    """int64 [tensors]: the sum of all trainers' shard_checksums() for this rank of the replica. Called by the trainers
    with their checksums as `own`, and by the replica's ranks, which use the result."""
    transfers, got = [], []
    total = torch.zeros(len(channel.layout), dtype=torch.int64, device=channel.device)
    for index, receiver in enumerate(channel.needs):
        if rank == receiver:
            for trainer in trainers:
                if trainer == rank:
                    got.append(own[index].to(channel.device))
                else:
                    got.append(torch.zeros_like(total))
                    transfers.append(Transfer(got[-1], channel.ranks.index(trainer), sends=False))
        elif rank in trainers:
            given = own[index].to(channel.device).contiguous()
            transfers.append(Transfer(given, channel.ranks.index(receiver), sends=True))
    begin(channel.group, transfers).wait()
    return sum(got, total).cpu()
