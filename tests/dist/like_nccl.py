"""A gloo group with the rules of torch's ProcessGroupNCCL (2.13) that records which communicators NCCL would make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

WHOLE = "of the group"


class LikeNCCL:
    """communicators: in the order in which they are made, WHOLE or the ranks of a pair. batches: the transfers of each,
    as (whether it sends, peer).

    A communicator's calls are carried out one after another, those of a batch at once. All ranks make that of the
    group together; a transfer outside a batch makes one of two ranks before.
    """

    supports_coalescing = True

    def __init__(self, gloo: Any, rank: int):
        self._gloo, self._rank, self.abort = gloo, rank, gloo.abort
        self.communicators: list[str | tuple[int, int]] = []
        self.batches: list[list[tuple[bool, int]]] = []
        self._streams: dict[Any, ThreadPoolExecutor] = {}
        self._batch: list[Callable[[], Any]] | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._gloo.allreduce([torch.zeros(1)]).wait()  # with all ranks, or not at all
        self._stream(WHOLE)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Later | None:
        return self._transfer(True, peer, lambda: self._gloo.send(tensors, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Later | None:
        return self._transfer(False, peer, lambda: self._gloo.recv(tensors, peer, tag))

    def _transfer(self, sends: bool, peer: int, start: Callable[[], Any]) -> Later | None:
        if peer == 99:
            raise RuntimeError("NCCL error: no such rank")
        if self._batch is not None:
            self._batch.append(start)
            self.batches[-1].append((sends, peer))
            return None
        key = WHOLE if WHOLE in self._streams else (min(self._rank, peer), max(self._rank, peer))
        return Later(self._stream(key).submit(all_of, [start]))

    def _start_coalescing(self) -> None:
        assert self._batch is None, "the last batch has ended"
        self._batch = []
        self.batches.append([])

    def _end_coalescing(self) -> Later | None:
        starts, self._batch = self._batch or [], None
        if not starts:
            return None
        assert WHOLE in self._streams, "all ranks of the group must take part in its first call"
        return Later(self._stream(WHOLE).submit(all_of, starts))

    def _stream(self, key: Any) -> ThreadPoolExecutor:
        if key not in self._streams:
            self.communicators.append(key)
            self._streams[key] = ThreadPoolExecutor(1)
        return self._streams[key]


def all_of(starts: Sequence[Callable[[], Any]]) -> None:
    for work in [start() for start in starts]:
        work.wait()


class Later:
    """A work that reports whether it has ended."""

    def __init__(self, done: Future[None]):
        self._done, self.is_completed = done, done.done

    def wait(self, timeout: timedelta | None = None) -> None:
        self._done.result(None if timeout is None else timeout.total_seconds())
