"""Rollout transfer between ranks: per pair one byte tensor with all fields but ragged ones, then one with these, then
one with the pixels of images."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpcrl.messaging.abortable import GroupLost
from hpcrl.messaging.messages import Move
from hpcrl.spec.image_rows import image_spans
from hpcrl.spec.media import IMAGES

Fields = Sequence[tuple[str, np.dtype]]
RaggedFields = Sequence[tuple[str, np.dtype, str]]
"""Name, dtype, and the row field that holds each row's number of values."""
FieldSizes = Sequence[tuple[str, np.dtype, int]]
"""Name, dtype and number of values of each field of a move, in the order in which the fields are sent."""
Arrays = Mapping[str, Sequence[np.ndarray]]
"""For each field, one array per sample."""
Pick = Callable[[Sequence[int]], Arrays]
PickPictures = Callable[[Sequence[int]], Mapping[bytes, bytes]]
"""For some samples, the pixels of their images by digest."""


PEER_WORDS = ("gloo/transport", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


def blames_peer(error: BaseException) -> bool:
    """Whether this error of a group, which gloo and NCCL raise as RuntimeError, means that another rank is lost."""
    words = isinstance(error, RuntimeError) and any(word in str(error) for word in PEER_WORDS)
    return words or isinstance(error, GroupLost)


class PeerLost(RuntimeError):
    """A transfer with rank `peer` failed. `text` contains gloo's message; the group is unusable afterwards."""

    def __init__(self, peer: int, text: str):
        super().__init__(text)
        self.peer = peer


@dataclass
class TransferGroup:
    """A process group between roles, and its world ranks in order."""

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
        ragged_fields: RaggedFields = (),
        pick_pictures: PickPictures | None = None,
    ) -> list[tuple[Move, dict[str, np.ndarray]]]:
        """Carry out this rank's moves, and return the received fields in the order of the moves.

        Args:
            pick: Returns, for a move's sample ids, one array per sample for every field.
            text: Name of the field with UTF-8 texts, which is sent in moves that have text_bytes.
            ragged_fields: These fields are sent when the destination has received their numbers of values.
            pick_pictures: If the field `images` is one of them, the pixels of a move's different images are sent last,
                once each; they are received under their picture_name().

        Every source and destination of a move calls this with equal lists, which have at most one move per pair.
        ValueError if picked arrays do not have the move's lengths. PeerLost if a peer ends or the group's timeout
        passes; all other moves are completed first.
        """
        own = [move for move in moves if rank in (move.source, move.dest)]
        errors: list[PeerLost] = []

        def parcel(move: Move, sizes: FieldSizes, arrays: Arrays) -> tuple[np.ndarray, dict[str, np.ndarray]]:
            return _gather(move, sizes, arrays) if move.source == rank and move.samples else _buffer(sizes)

        def post(move: Move, buffer: np.ndarray) -> Any:
            """Start to send or receive a buffer; None if nothing is sent."""
            if move.source == move.dest or not buffer.size:
                return None
            peer, act = (move.dest, self.group.send) if move.source == rank else (move.source, self.group.recv)
            return act([torch.from_numpy(buffer)], self.ranks.index(peer), 0)

        def complete(move: Move, arrays: Arrays, fields: dict[str, np.ndarray], work: Any) -> dict[str, np.ndarray]:
            """All fields of a move; after an error, possibly without the ragged fields."""
            with _noting(move, rank, errors):
                if work is not None:
                    work.wait()
                if ragged_fields:
                    sizes = [(name, dtype, int(fields[counts].sum())) for name, dtype, counts in ragged_fields]
                    buffer, ragged_values = parcel(move, sizes, arrays)
                    if (later := post(move, buffer)) is not None:
                        later.wait()
                    fields = fields | ragged_values
                if pick_pictures is not None and IMAGES.name in fields:
                    pictures = {span.digest: span for span in image_spans(fields[IMAGES.name])}
                    sizes = [(picture_name(d), np.dtype(np.uint8), span.num_bytes) for d, span in pictures.items()]
                    own_pictures = pick_pictures(move.samples) if move.source == rank and move.samples else {}
                    contents = {picture_name(d): [np.frombuffer(own_pictures[d], np.uint8)] for d in own_pictures}
                    buffer, pixels = parcel(move, sizes, contents)
                    if (last := post(move, buffer)) is not None:
                        last.wait()
                    fields = fields | pixels
            return fields

        picked = [pick(move.samples) if move.source == rank and move.samples else {} for move in own]
        parcels = [
            parcel(move, _sizes(move, token_fields, row_fields, text), arrays)
            for move, arrays in zip(own, picked, strict=True)
        ]
        # Two ranks connect at their first send or receive, and one of them waits for the other. This cannot deadlock:
        # all ranks process moves in the same order, and none waits for data before it has started all of its moves.
        posted: list[tuple[Move, Arrays, dict[str, np.ndarray], Any]] = []
        for move, arrays, (buffer, fields) in zip(own, picked, parcels, strict=True):
            with _noting(move, rank, errors):
                posted.append((move, arrays, fields, post(move, buffer)))
        if ragged_fields and posted:  # in threads: a lost rank must not delay the ragged fields of other moves
            with ThreadPoolExecutor(len(posted)) as pool:
                received = list(pool.map(complete, *zip(*posted, strict=True)))
        else:
            received = list(itertools.starmap(complete, posted))
        if errors:  # the first is the cause: a wait that times out closes all connections of the group
            raise errors[0]
        return [(move, fields) for move, fields in zip(own, received, strict=True) if move.dest == rank]


def picture_name(digest: bytes) -> str:
    """The name under which an image's pixels are received."""
    return f"picture/{digest.hex()}"


@contextlib.contextmanager
def _noting(move: Move, rank: int, errors: list[PeerLost]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        errors.append(PeerLost(move.dest if move.source == rank else move.source, str(error)))


def _sizes(move: Move, token_fields: Fields, row_fields: Fields, text: str) -> FieldSizes:
    """The fields of a move, except ragged ones, whose sizes follow from the move."""
    tokens, rows = sum(move.lengths), len(move.samples)
    sizes = [*((name, d, tokens) for name, d in token_fields), *((name, d, rows) for name, d in row_fields)]
    if text and move.text_bytes:
        sizes.append((text, np.dtype(np.uint8), sum(move.text_bytes)))
    return sizes


def _buffer(sizes: FieldSizes) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A byte buffer for fields, and the fields as views into it."""
    buffer = np.empty(sum(dtype.itemsize * count for _, dtype, count in sizes), np.uint8)
    fields, at = {}, 0
    for name, dtype, count in sizes:
        fields[name] = buffer[at : at + count * dtype.itemsize].view(dtype.base).reshape(count, *dtype.shape)
        at += count * dtype.itemsize
    return buffer, fields


def _gather(move: Move, sizes: FieldSizes, arrays: Arrays) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A move's buffer, filled directly from this rank's samples, since an extra array per field would cost more time
    than sending."""
    buffer, fields = _buffer(sizes)
    for name, field in fields.items():
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
    """Like ragged(), for rows given as the bytes of their values."""
    counts = np.array([len(row) // dtype.itemsize for row in rows], dtype=np.uint16)
    return counts.tobytes() + b"".join(rows)


def from_ragged(data: bytes, num_rows: int, dtype: str | np.dtype) -> list[np.ndarray]:
    """The rows that ragged() or ragged_bytes() packed."""
    counts = np.frombuffer(data, np.uint16, num_rows)
    values = np.frombuffer(data, dtype, offset=counts.nbytes)
    return np.split(values, np.cumsum(counts, dtype=np.int64)[:-1]) if num_rows else []
