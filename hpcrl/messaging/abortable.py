"""Process groups that survive the loss of a member, made for NCCL.

What torch does (2.13, ProcessGroupNCCL.cpp): by default a watchdog thread ends the process at an error or timeout, and
wait() does not block the host. With TORCH_NCCL_BLOCKING_WAIT, which the group's constructor reads, there is no
watchdog, and errors are raised on the waiting thread. If another thread aborts the group, wait() returns as if the data
had arrived. A waiting rank therefore polls here, and aborts and raises by itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.spec.weight_layout import CHANNELS
from hpcrl.system.clock import AwakeClock

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
LOOK_EVERY_S = 0.5  # between two polls of the lost ranks
FIRST_PAUSE_S, MAX_PAUSE_S = 50e-6, 2e-3  # between two polls of the work


class GroupLost(RuntimeError):
    """A member of a group is lost or does not take part; the group is aborted, and the process may continue."""


@contextlib.contextmanager
def blocking_wait() -> Iterator[None]:
    """NCCL groups made inside have no watchdog."""
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        del os.environ[BLOCKING_WAIT]
        if before is not None:
            os.environ[BLOCKING_WAIT] = before


def make_nccl(store: Any, rank: int, size: int) -> Any:
    """A dist.ProcessGroupNCCL for large transfers, without a watchdog. It creates its communicator when it connects."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = CHANNELS
    with blocking_wait():
        return dist.ProcessGroupNCCL(store, rank, size, options)


class AbortableGroup:
    """A process group over world ranks, for point-to-point transfers, single or in batches (hpcrl.comm.batched_p2p). A
    wait aborts the group if a member is in lost_ranks(), the world ranks that the controller treats as lost, or after
    timeout_s, not counting time during which the job is suspended."""

    def __init__(
        self, group: Any, name: str, ranks: Sequence[int], timeout_s: float, lost_ranks: Callable[[], Collection[int]]
    ):
        self._group, self._name, self._ranks = group, name, frozenset(ranks)
        self._timeout_s, self._lost_ranks = timeout_s, lost_ranks
        self._why = ""  # why the group was aborted

    def send(self, tensors: list[Tensor], dest: int, tag: int) -> AbortableWork:
        """ProcessGroup.send(); GroupLost if the group is already aborted."""
        return self._started(self._group.send, tensors, dest, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> AbortableWork:
        """See send()."""
        return self._started(self._group.recv, tensors, source, tag)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """ProcessGroup.eager_connect_single_device()."""
        self._group.eager_connect_single_device(device)

    @property
    def supports_coalescing(self) -> bool:
        """Whether the group can batch transfers."""
        return bool(self._group.supports_coalescing)

    def _start_coalescing(self) -> None:
        self._raise_if_given_up()
        self._group._start_coalescing()

    def _end_coalescing(self) -> AbortableWork:
        return AbortableWork(self, self._group._end_coalescing())

    def _started(self, start: Callable[..., Any], *arguments: Any) -> AbortableWork:
        self._raise_if_given_up()
        return AbortableWork(self, start(*arguments))

    def wait(self, work: Any, timeout_s: float | None) -> None:
        """See AbortableWork.wait()."""
        allowed_s = self._timeout_s if timeout_s is None else timeout_s
        clock, pause_s, look_at_s = AwakeClock(allowed_s), FIRST_PAUSE_S, LOOK_EVERY_S
        while not work.is_completed():
            self._raise_if_given_up()
            now = clock.now()
            if now >= look_at_s:
                look_at_s = now + LOOK_EVERY_S
                if lost := sorted(self._ranks & set(self._lost_ranks())):
                    self._give_up(f"rank {', '.join(map(str, lost))} is lost")
            if now > allowed_s:
                self._give_up(f"no answer for {allowed_s:.3g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        work.wait()  # raises the transfer's error; on CUDA, the rank's current stream waits for the transfer

    def _give_up(self, why: str) -> None:
        self._why = why
        self._group.abort()  # else kernels that wait for the peer would occupy the GPU
        self._raise_if_given_up()

    def _raise_if_given_up(self) -> None:
        if self._why:
            raise GroupLost(f"the group {self._name} was aborted: {self._why}")


class AbortableWork:
    """A started transfer of a group."""

    def __init__(self, group: AbortableGroup, work: Any):
        self._group, self._work = group, work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block the host until the data has arrived, then return True. `timeout` replaces the group's timeout.

        GroupLost if a member is lost or the timeout expires (the tensors are then undefined), RuntimeError for an error
        of the library."""
        self._group.wait(self._work, None if timeout is None else timeout.total_seconds())
        return True
