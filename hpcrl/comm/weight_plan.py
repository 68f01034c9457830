"""The plan of a weight update: which trainer rank sends which slice of which weight to which generator rank, in which
step. It depends only on the owned and required slices, and every rank computes an equal plan once per run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpcrl.spec.weight_layout import RequiredSlices, TensorShards, TensorSlice, count, intersection

BUCKET_BYTES = 256 << 20
"""Maximum bytes that the ranks of a replica receive in one step, all ranks together."""
SHARED_BYTES = 1 << 20
"""A piece that several ranks hold is split among these senders if it has more bytes than this."""
ALIGN = 16
"""Pieces in a message are padded to a multiple of this many bytes, so the next piece can be viewed in any dtype."""
FLOATS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
ITEM_BYTES = FLOATS | {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of the layout's tensor number `tensor`, sent from one rank to another."""

    tensor: int
    tensor_slice: TensorSlice
    dtype: str
    sender: int
    receiver: int

    @property
    def num_bytes(self) -> int:
        """Bytes in a message, without padding."""
        return count(self.tensor_slice) * ITEM_BYTES[self.dtype]


def padded(size: int) -> int:
    """Bytes with padding."""
    return -(-size // ALIGN) * ALIGN


def arriving_dtype(held: TensorShards, need: RequiredSlices) -> str:
    """The dtype in which a tensor is sent; integer types are not converted."""
    return need.dtype if need.dtype and held.dtype in FLOATS else held.dtype


def plan_pieces(
    layout: Sequence[TensorShards], needs: Mapping[int, Sequence[RequiredSlices]], bucket_bytes: int = BUCKET_BYTES
) -> list[list[Piece]]:
    """The pieces of each step, tensor by tensor. ValueError if no rank holds a required slice.

    Args:
        needs: Maps each rank of a replica to its required slices of every tensor of the layout.
        bucket_bytes: Maximum bytes of a step. Larger pieces are cut.

    A rank that holds a required slice sends it to itself; otherwise, the holder that has sent this rank the fewest
    bytes sends it. So replicas that hold nothing get equal pieces from equal senders, which pack them only once.
    """
    steps: list[list[Piece]] = [[]]
    used = 0
    loads: dict[int, Counter[int]] = {receiver: Counter() for receiver in needs}
    for number, held in enumerate(layout):
        pieces = [
            piece
            for index, (receiver, need) in enumerate(needs.items())
            for piece in _pieces(number, held, need[number], receiver, index, loads[receiver])
        ]
        columns = [_cut(piece, bucket_bytes // len(pieces)) for piece in pieces]
        # Take one chunk of every piece in turn, so all senders of a large tensor take part in each step.
        for piece in itertools.chain.from_iterable(itertools.zip_longest(*columns)):
            if piece is None:
                continue
            size = padded(piece.num_bytes)
            if steps[-1] and used + size > bucket_bytes:
                steps.append([])
                used = 0
            steps[-1].append(piece)
            used += size
    return steps


def _pieces(
    number: int, held: TensorShards, need: RequiredSlices, receiver: int, index: int, load: Counter[int]
) -> list[Piece]:
    """The pieces of one tensor for `receiver`, which is rank number `index` of its replica. `load` counts the bytes
    from each sender to this receiver so far, and is increased."""
    dtype, pieces = arriving_dtype(held, need), []
    for wanted in need.slices:
        found = 0
        for part, holders in held.parts:
            if (tensor_slice := intersection(part, wanted)) is None:
                continue
            found += count(tensor_slice)
            piece = Piece(number, tensor_slice, dtype, receiver, receiver)
            if receiver in holders:
                pieces.append(piece)
                continue
            turn = (index + number) % len(holders)
            nearest = [*holders[turn:], *holders[:turn]]
            for share in _cut(piece, max(SHARED_BYTES, -(-piece.num_bytes // len(holders)))):
                sender = min(nearest, key=lambda rank: load[rank])
                pieces.append(replace(share, sender=sender))
                load[sender] += share.num_bytes
        if found != count(wanted):
            text = f"generator rank {receiver} needs {count(wanted)} numbers of weight {held.name}"
            raise ValueError(f"{text}, and the trainer ranks hold {found} of them")
    return pieces


def _cut(piece: Piece, most_bytes: int) -> list[Piece]:
    """Cut the piece into chunks of at most most_bytes, or of one number if that is larger."""
    axis = next((i for i, (first, last) in enumerate(piece.tensor_slice) if last - first > 1), None)
    if piece.num_bytes <= most_bytes or axis is None:
        return [piece]
    first, last = piece.tensor_slice[axis]
    rows = max(1, most_bytes * (last - first) // piece.num_bytes)
    bounds = ((start, min(start + rows, last)) for start in range(first, last, rows))
    slices = ((*piece.tensor_slice[:axis], bound, *piece.tensor_slice[axis + 1 :]) for bound in bounds)
    return [chunk for tensor_slice in slices for chunk in _cut(replace(piece, tensor_slice=tensor_slice), most_bytes)]
