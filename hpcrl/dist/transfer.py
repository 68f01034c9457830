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

        pack(sample ids) gives every field of these samples, concatenated. Called by every source and destination of a
        move with the same list; at most one move per pair. Waits under the group's timeout.
        """
        works, keep = [], []
        for move in moves:
            if move.source == rank and move.dest != rank:
                packed = pack(move.samples)
                parts = [
                    np.ascontiguousarray(packed[name], dtype).view(np.uint8)
                    for name, dtype in [*token_fields, *row_fields]
                ]
                buffer = torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(0, dtype=torch.uint8)
                keep.append(buffer)
                works.append(self.group.send([buffer], self.ranks.index(move.dest), 0))
        received = []
        for move in moves:
            if move.dest != rank:
                continue
            if move.source == rank:
                received.append((move, pack(move.samples)))
                continue
            tokens, rows = sum(move.lengths), len(move.samples)
            sizes = [(name, dtype, tokens) for name, dtype in token_fields]
            sizes += [(name, dtype, rows) for name, dtype in row_fields]
            buffer = torch.empty(sum(d.itemsize * n for _, d, n in sizes), dtype=torch.uint8)
            self.group.recv([buffer], self.ranks.index(move.source), 0).wait()
            raw, fields, at = buffer.numpy(), {}, 0
            for name, dtype, count in sizes:
                fields[name] = raw[at : at + count * dtype.itemsize].view(dtype)
                at += count * dtype.itemsize
            received.append((move, fields))
        for work in works:
            work.wait()
        return received
