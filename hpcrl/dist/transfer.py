"""Rollouts between ranks: fields packed flat into one byte tensor per pair of ranks, sizes known on both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from hpcrl.dist.messages import Move

Fields = Sequence[tuple[str, np.dtype]]


@dataclass
class Fabric:
    """A group between roles and the world ranks that are in it, in order."""

    group: dist.ProcessGroupGloo
    ranks: Sequence[int]

    def exchange(
        self,
        rank: int,
        moves: Sequence[Move],
        token_fields: Fields,
        row_fields: Fields,
        pack: Callable[[Sequence[int]], dict[str, np.ndarray]],
    ) -> list[tuple[Move, dict[str, np.ndarray]]]:
        """Carry out the moves that touch `rank`; returns what it gets, in the order of the moves.

        pack(sample ids) gives every field of these samples, concatenated; ValueError where that is not as long as the
        move says. Called by every source and destination of a move with the same list; at most one move per pair.
        Waits under the group's timeout; RuntimeError when that is over or a peer has ended.
        """
        works, keep = [], []
        for move in moves:
            if move.source == rank and move.dest != rank and move.samples:
                fields = _gather(move, token_fields, row_fields, pack)
                buffer = torch.from_numpy(np.concatenate([field.view(np.uint8) for field in fields.values()]))
                keep.append(buffer)
                works.append(self.group.send([buffer], self.ranks.index(move.dest), 0))
        received = []
        for move in moves:
            if move.dest != rank:
                continue
            if move.source == rank or not move.samples:
                received.append((move, _gather(move, token_fields, row_fields, pack)))
                continue
            sizes = _sizes(move, token_fields, row_fields)
            buffer = torch.empty(sum(dtype.itemsize * count for _, dtype, count in sizes), dtype=torch.uint8)
            self.group.recv([buffer], self.ranks.index(move.source), 0).wait()
            raw, fields, at = buffer.numpy(), {}, 0
            for name, dtype, count in sizes:
                fields[name] = raw[at : at + count * dtype.itemsize].view(dtype)
                at += count * dtype.itemsize
            received.append((move, fields))
        for work in works:
            work.wait()
        return received


def _sizes(move: Move, token_fields: Fields, row_fields: Fields) -> list[tuple[str, np.dtype, int]]:
    """Fields in the order in which they travel, with their number of values."""
    tokens, rows = sum(move.lengths), len(move.samples)
    return [(name, dtype, tokens) for name, dtype in token_fields] + [(name, dtype, rows) for name, dtype in row_fields]


def _gather(
    move: Move, token_fields: Fields, row_fields: Fields, pack: Callable[[Sequence[int]], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The fields of a move on the rank that holds its samples."""
    sizes = _sizes(move, token_fields, row_fields)
    if not move.samples:
        return {name: np.empty(0, dtype) for name, dtype, _ in sizes}
    packed = pack(move.samples)
    fields = {name: np.ascontiguousarray(packed[name], dtype) for name, dtype, _ in sizes}
    for name, _, count in sizes:
        if len(fields[name]) != count:
            raise ValueError(
                f"move of {len(move.samples)} samples from rank {move.source} to {move.dest}: {name} has "
                f"{len(fields[name])} values where the controller counted {count}"
            )
    return fields
