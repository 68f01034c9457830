"""What the host has asked a device for and cannot yet rely on: copies that do not block, and transfers.

All streams are one: the device does everything in order, and the host knows of nothing before it waits. Until then the
place of a copy to the host holds poison, and what a copy or a transfer reads must stay as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ReusedEarly(RuntimeError):
    """Memory was written while a copy or a transfer still used it."""


def poison(place: Tensor) -> None:
    """Fill with what no result should hold: NaN, or the bits of -1."""
    place.detach().fill_(float("nan") if place.is_floating_point() else True if place.dtype == torch.bool else -1)


def unchanged(memory: Tensor, before: Tensor, how: str) -> None:
    """ReusedEarly if the bits of the memory differ from `before`."""
    dense = (torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().reshape(-1)) for x in (memory, before))
    bits = [x.view(torch.uint8) for x in dense]
    if not torch.equal(*bits):
        raise ReusedEarly(f"{how} was written before the host waited: {[*memory.shape]} {memory.dtype}")


class Stream:
    """The one stream. Places are on the host, values on the CPU in the place of the device."""

    def __init__(self) -> None:
        self._started: list[Callable[[], None]] = []
        self._num_ended = 0

    def to_host(self, place: Tensor, value: Tensor) -> None:
        """Start a copy; its value is that of now, since what the device does later comes after it."""
        value = value.detach().clone()
        poison(place)
        empty = place.detach().clone()

        def end() -> None:
            unchanged(place, empty, "the place of a copy to the host")
            place.detach().copy_(value)

        self._started.append(end)

    def from_host(self, source: Tensor) -> None:
        """Note that a copy from here was started."""
        before = source.detach().clone()
        self._started.append(lambda: unchanged(source, before, "the source of a copy to the device"))

    @property
    def now(self) -> int:
        """How much was started."""
        return self._num_ended + len(self._started)

    def end(self, until: int | None = None) -> None:
        """Let what was started before this `now` end. ReusedEarly."""
        while self._started and (until is None or self._num_ended < until):
            self._num_ended += 1
            self._started.pop(0)()


class Transfers:
    """Stands for a process group over NCCL, on one over gloo: point to point, alone or in batches, of tensors on the
    device.

    A tensor that is sent must stay as it is until wait(), one that is received holds poison until then.
    """

    supports_coalescing = True

    def __init__(self, gloo: Any):
        self._gloo = gloo
        self._batch: list[Work] | None = None

    def send(self, tensors: list[Any], dest: int, tag: int) -> Work:
        (tensor,) = (_on_device(tensor) for tensor in tensors)
        sent = tensor.detach().clone()
        work = Work(self._gloo.send([sent], dest, tag), lambda: unchanged(tensor, sent, "what was sent"))
        return self._made(work)

    def recv(self, tensors: list[Any], source: int, tag: int) -> Work:
        (tensor,) = (_on_device(tensor) for tensor in tensors)
        arriving = torch.empty_like(tensor)
        poison(tensor)
        return self._made(Work(self._gloo.recv([arriving], source, tag), lambda: tensor.copy_(arriving)))

    def eager_connect_single_device(self, device: torch.device) -> None:
        """NCCL connects all members."""

    def abort(self) -> None:
        """There is no kernel that waits."""

    def _made(self, work: Work) -> Work:
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device | None = None) -> Work:
        batch, self._batch = self._batch or [], None
        return Works(batch)


class Work:
    """A started transfer."""

    def __init__(self, work: Any, end: Callable[[], Any]):
        self._work, self._end = work, end

    def is_completed(self) -> bool:
        """Gloo only knows once it has waited."""
        return True

    def wait(self, *timeout: Any) -> bool:
        self._work.wait(*timeout)
        self._end()
        return True


class Works(Work):
    """A batch of them."""

    def __init__(self, works: list[Work]):
        self._works = works

    def wait(self, *timeout: Any) -> bool:
        return all(work.wait(*timeout) for work in self._works)


def _on_device(tensor: Any) -> Tensor:
    """The numbers of a tensor on the device."""
    if not hasattr(tensor, "elem"):
        raise RuntimeError("No backend type associated with device type cpu")
    return tensor.elem
