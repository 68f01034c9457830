"""Rollout transfer between ranks: fields packed flat into one byte tensor per pair of ranks; both sides know the
sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpcrl.messaging.abortable import GroupLost
from hpcrl.messaging.messages import Move

Fields = Sequence[tuple[str, np.dtype]]
Pick = Callable[[Sequence[int]], Mapping[str, Sequence[np.ndarray]]]


PEER_WORDS = ("gloo/transport", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


def blames_peer(error: BaseException) -> bool:
    """Whether this error of a group, which gloo and NCCL raise as RuntimeError, means that another rank is lost."""
    words = isinstance(error, RuntimeError) and any(word in str(error) for word in PEER_WORDS)
    return words or isinstance(error, GroupLost)


class PeerLost(RuntimeError):
    """A transfer with rank `peer` failed; the text contains gloo's message. The group is unusable afterwards."""

    def __init__(self, peer: int, text: str):
        super().__init__(text)
        self.peer = peer


@dataclass
class TransferGroup:
    """A group between roles and its world ranks, in order."""

    group: Any  # dist.ProcessGroupGloo, whose methods torch's stubs lack
    ranks: Sequence[int]

    def exchange(
        self,
        rank: int,
        moves: Sequence[Move],
        token_fields: Fields,
        row_fields: Fields,
        pick: Pick,
        text: str = "",
    ) -> list[tuple[Move, dict[str, np.ndarray]]]:
        """Carry out the moves from or to `rank`; returns what this rank receives, in the order of the moves.

        Args:
            pick: returns for sample ids one array per sample for every field; ValueError if their lengths differ from
                the
        move's.
            text: name of a field of UTF-8 texts, sent with the moves that have text_bytes.

        Called with equal lists by every source and destination of a move; at most one move per pair. PeerLost after the
        group's timeout or the end of a peer, once every other move is done.
        """
        own = [move for move in moves if rank in (move.source, move.dest)]
        parcels = [
            _gather(move, token_fields, row_fields, pick, text)
            if move.source == rank
            else _buffer(move, token_fields, row_fields, text)
            for move in own
        ]
        # Two ranks connect at their first communication, and one of them waits for the other. No rank waits for data
        # before connecting, and all ranks follow the list of moves, so they cannot wait for each other in a circle.
        works: list[tuple[int, Any]] = []
        errors: list[PeerLost] = []
        for move, (buffer, _) in zip(own, parcels, strict=True):
            if move.source == move.dest or not move.samples:
                continue
            peer, act = (move.dest, self.group.send) if move.source == rank else (move.source, self.group.recv)
            with _noting(peer, errors):
                works.append((peer, act([torch.from_numpy(buffer)], self.ranks.index(peer), 0)))
        for peer, work in works:
            with _noting(peer, errors):
                work.wait()
        if errors:  # the first error: a wait that times out closes all connections of the group
            raise errors[0]
        return [(move, fields) for move, (_, fields) in zip(own, parcels, strict=True) if move.dest == rank]


@contextlib.contextmanager
def _noting(peer: int, errors: list[PeerLost]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        errors.append(PeerLost(peer, str(error)))


def _buffer(
    move: Move, token_fields: Fields, row_fields: Fields, text: str
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A byte buffer for a move, and views of its fields in transfer order."""
    tokens, rows = sum(move.lengths), len(move.samples)
    sizes = [*((name, d, tokens) for name, d in token_fields), *((name, d, rows) for name, d in row_fields)]
    if text and move.text_bytes:
        sizes.append((text, np.dtype(np.uint8), sum(move.text_bytes)))
    buffer = np.empty(sum(dtype.itemsize * count for _, dtype, count in sizes), np.uint8)
    fields, at = {}, 0
    for name, dtype, count in sizes:
        fields[name] = buffer[at : at + count * dtype.itemsize].view(dtype.base).reshape(count, *dtype.shape)
        at += count * dtype.itemsize
    return buffer, fields


def _gather(
    move: Move, token_fields: Fields, row_fields: Fields, pick: Pick, text: str
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A move filled on the rank that holds its samples, directly in the buffer: an intermediate array per field would
    cost more than the transfer."""
    buffer, fields = _buffer(move, token_fields, row_fields, text)
    arrays = pick(move.samples) if move.samples else {}
    for name, field in fields.items() if move.samples else ():
        count = sum(map(len, arrays[name]))
        if count != len(field):
            raise ValueError(
                f"move of {len(move.samples)} samples from rank {move.source} to {move.dest}: {name} has {count} "
                f"values where the controller counted {len(field)}"
            )
        np.concatenate(arrays[name], out=field, casting="same_kind")
    return buffer, fields


def ragged(rows: Sequence[Sequence[float]], dtype: str) -> bytes:
    """Rows of different lengths as bytes: the lengths as uint16, then the values."""
    counts = np.array([len(row) for row in rows], dtype=np.uint16)
    return counts.tobytes() + np.array([value for row in rows for value in row], dtype=dtype).tobytes()


def ragged_bytes(rows: Sequence[bytes], dtype: np.dtype) -> bytes:
    """As ragged(), for rows given as the bytes of their values."""
    counts = np.array([len(row) // dtype.itemsize for row in rows], dtype=np.uint16)
    return counts.tobytes() + b"".join(rows)


def from_ragged(data: bytes, num_rows: int, dtype: str | np.dtype) -> list[np.ndarray]:
    """The rows that ragged() or ragged_bytes() packed."""
    counts = np.frombuffer(data, np.uint16, num_rows)
    values = np.frombuffer(data, dtype, offset=counts.nbytes)
    return np.split(values, np.cumsum(counts, dtype=np.int64)[:-1]) if num_rows else []
