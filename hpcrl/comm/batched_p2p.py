"""Sends and receives of a group that start together, and the one communicator that carries them on GPUs.

What torch does (2.13, pointToPoint and initNCCLComm in ProcessGroupNCCL.cpp): a send or receive of its own makes a
communicator of its two ranks, unless eager_connect_single_device() has made that of the group. Those between
_start_coalescing() and _end_coalescing() use the group's, in one call of NCCL, whatever their order; if there is none
yet, all ranks of the group must take part in the first such call (torch.distributed.batch_isend_irecv), which a
transfer between some of them is not. A communicator carries out its calls one after another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

LAST_WAIT_S = 0.05
"""Time for a rank that others have waited for already."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor to or from rank `peer` of a group, counted within it."""

    tensor: Tensor
    peer: int
    sends: bool


class Begun:
    """Transfers that were started together."""

    def __init__(self, works: Sequence[Any]):
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when all have ended; at once if they have. timeout: of all together, instead of the group's of each.
        RuntimeError of the group if one fails."""
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while self._works:  # a work of gloo can be waited for once
            if end is None:
                self._works[0].wait()
            else:
                self._works[0].wait(timedelta(seconds=max(LAST_WAIT_S, end - time.monotonic())))
            del self._works[0]


def make_communicator(group: Any, device: torch.device) -> None:
    """Make the communicator of a group of NCCL, before its first transfer. A collective would make it, too, and take
    buffers for its rings. Nothing for gloo. Called by all ranks of the group."""
    group.eager_connect_single_device(device)


def begin(group: Any, transfers: Sequence[Transfer]) -> Begun:
    """Start these transfers of one rank: in one batch, if the group's library can (NCCL), else one by one (gloo). The
    ranks at the other ends start theirs; those between two ranks in the same direction have the same order on both.
    RuntimeError of the group if it is unusable."""
    if not transfers:
        return Begun([])
    if not group.supports_coalescing:
        return Begun([_begin(group, transfer) for transfer in transfers])
    group._start_coalescing()
    try:
        for transfer in transfers:
            _begin(group, transfer)
    finally:  # or later calls of NCCL, of any group, would belong to the batch
        work = group._end_coalescing()
    return Begun([work])


def _begin(group: Any, transfer: Transfer) -> Any:
    return (group.send if transfer.sends else group.recv)([transfer.tensor], transfer.peer, 0)
