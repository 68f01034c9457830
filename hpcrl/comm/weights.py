"""Named tensors in buckets, from one rank of a group to the others: mainly weights, staged once per version and pulled
by one replica after another.

Weights are staged in host memory, since the GPU holds the trainer's state, and broadcast by gloo, or by NCCL with one
bucket on the GPU at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

BUCKET_BYTES = 256 << 20
ALIGN = 16


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a bucket: HF name, dtype as torch names it, shape."""

    name: str
    dtype: str
    shape: list[int]


class Bucket:
    """Tensors packed into one byte tensor: in host memory, or on the GPU that received it."""

    def __init__(self, entries: list[Entry], data: torch.Tensor):
        self.entries, self.data = entries, data

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, view into the bucket) in order."""
        at = 0
        for entry in self.entries:
            dtype = getattr(torch, entry.dtype)
            size = int(np.prod(entry.shape, dtype=np.int64)) * dtype.itemsize
            yield entry.name, self.data[at : at + size].view(dtype).view(entry.shape)
            at += _padded(size)


def stage(named: Iterable[tuple[str, torch.Tensor]], keep: bool) -> list[Bucket]:
    """Exhaust `named` (for weights a collective on the trainers); with `keep`, return copies in buckets of about 256
    MiB."""
    buckets: list[Bucket] = []
    entries: list[Entry] = []
    parts: list[torch.Tensor] = []

    def flush() -> None:
        buckets.append(Bucket(list(entries), torch.cat(parts)))
        entries.clear()
        parts.clear()

    for name, tensor in named:
        if not keep:
            continue
        entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
        # Copied before the next one is drawn: the engine may reuse the memory. A bucket is allocated twice meanwhile.
        parts.append(_padded_bytes(tensor.detach()))
        if sum(part.numel() for part in parts) >= BUCKET_BYTES:
            flush()
    if entries:
        flush()
    return buckets


def _padded_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory as bytes, padded to ALIGN so that the next tensor can be viewed in any dtype."""
    size = tensor.numel() * tensor.element_size()
    copy = torch.zeros(_padded(size), dtype=torch.uint8)
    copy[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return copy


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def send_buckets(group: Any, buckets: list[Bucket], root: int) -> None:
    """Broadcast the buckets over a group (gloo or NCCL) from group rank `root`; called by that rank."""
    header = torch.frombuffer(bytearray(msgspec.msgpack.encode([b.entries for b in buckets])), dtype=torch.uint8)
    _broadcast(group, torch.tensor([header.numel()]), root)
    _broadcast(group, header, root)
    for bucket in buckets:
        _broadcast(group, bucket.data, root)


def receive_buckets(group: Any, root: int) -> Iterator[Bucket]:
    """The buckets of send_buckets as they arrive; called, and exhausted, by every other rank of the group."""
    size = int(_broadcast(group, torch.zeros(1, dtype=torch.int64), root))
    header = _broadcast(group, torch.empty(size, dtype=torch.uint8), root)
    for entries in msgspec.msgpack.decode(header.cpu().numpy().tobytes(), type=list[list[Entry]]):
        nbytes = [int(np.prod(e.shape, dtype=np.int64)) * getattr(torch, e.dtype).itemsize for e in entries]
        yield Bucket(entries, _broadcast(group, torch.empty(sum(map(_padded, nbytes)), dtype=torch.uint8), root))


def _broadcast(group: Any, tensor: torch.Tensor, root: int) -> torch.Tensor:
    """The root's tensor, on the group's device. NCCL: later work on this rank's current stream waits for it."""
    tensor = tensor.to("cpu" if isinstance(group, dist.ProcessGroupGloo) else "cuda")
    options = dist.BroadcastOptions()
    options.rootRank = root
    group.broadcast([tensor], options).wait()
    return tensor
