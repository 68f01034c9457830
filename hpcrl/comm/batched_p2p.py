"""Sends and receives of a group that start together, and the one communicator that carries them on GPUs.

torch's behaviour (2.13, pointToPoint and initNCCLComm in ProcessGroupNCCL.cpp): a single send or receive creates a
communicator of its two ranks, unless eager_connect_single_device() has created the group's. Calls between
_start_coalescing() and _end_coalescing() use the group's communicator, in one NCCL call, whatever their order. If it
does not exist yet, all ranks of the group must take part in the first such call (torch.distributed.batch_isend_irecv),
but a transfer does not involve all of them. A communicator executes its calls one after another.
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
"""Minimum timeout for a rank whose peers have already been waited for."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor to or from rank `peer` of a group (group rank)."""

    tensor: Tensor
    peer: int
    sends: bool


class Begun:
    """Transfers that were started together."""

    def __init__(self, works: Sequence[Any]):
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when all have ended. timeout: for all together, instead of the group's timeout for each. RuntimeError
        of the group if one fails."""
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while self._works:  # a gloo work can be waited for only once
            if end is None:
                self._works[0].wait()
            else:
                self._works[0].wait(timedelta(seconds=max(LAST_WAIT_S, end - time.monotonic())))
            del self._works[0]


def make_communicator(group: Any, device: torch.device) -> None:
    """Create the communicator of an NCCL group before its first transfer. A collective would also create it, but
    allocate buffers for its rings. Does nothing for gloo. Called by all ranks of the group."""
    group.eager_connect_single_device(device)


def begin(group: Any, transfers: Sequence[Transfer]) -> Begun:
    """Start this rank's transfers: in one batch if the group's library can (NCCL), else one by one (gloo). The peers
    start theirs; transfers between two ranks in one direction have equal order on both. RuntimeError of the group if it
    is unusable."""
    if not transfers:
        return Begun([])
    if not group.supports_coalescing:
        return Begun([_begin(group, transfer) for transfer in transfers])
    group._start_coalescing()
    try:
        for transfer in transfers:
            _begin(group, transfer)
    finally:  # or later calls of NCCL, in any group, would join the batch
        work = group._end_coalescing()
    return Begun([work])


def _begin(group: Any, transfer: Transfer) -> Any:
    return (group.send if transfer.sends else group.recv)([transfer.tensor], transfer.peer, 0)
