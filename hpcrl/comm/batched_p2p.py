"""Start several sends and receives of a group at once; on GPUs, one communicator of the group carries them all.

In torch 2.13 (pointToPoint and initNCCLComm in ProcessGroupNCCL.cpp), a single send or receive creates a communicator
of its two ranks, unless eager_connect_single_device() has already created the group's communicator. Calls between
_start_coalescing() and _end_coalescing() become one NCCL call on the group's communicator, in any order. To create that
communicator, such a call would need all ranks of the group (torch.distributed.batch_isend_irecv), and a transfer does
not involve all of them. A communicator executes its calls one after another.
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
"""Minimum seconds to wait for each transfer, even if earlier transfers have used up the common timeout."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor to send to or to receive from `peer`, a rank within the group."""

    tensor: Tensor
    peer: int
    sends: bool


class Begun:
    """Transfers that were started together."""

    def __init__(self, works: Sequence[Any]):
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until all transfers have ended. `timeout` limits them together; without it, the group's timeout limits
        each one. Raises the group's RuntimeError if a transfer fails."""
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while self._works:  # a gloo work can be waited for only once
            if end is None:
                self._works[0].wait()
            else:
                self._works[0].wait(timedelta(seconds=max(LAST_WAIT_S, end - time.monotonic())))
            del self._works[0]


def make_communicator(group: Any, device: torch.device) -> None:
    """Create an NCCL group's communicator before the first transfer; does nothing for gloo. Called by all ranks of the
    group. A collective would also create the communicator, but with buffers for rings."""
    group.eager_connect_single_device(device)


def begin(group: Any, transfers: Sequence[Transfer]) -> Begun:
    """Start this rank's transfers, in one batch over NCCL and one by one over gloo. The peers call begin() too, with
    transfers from one rank to another in the same order on both. Raises the group's RuntimeError if it is unusable."""
    if not transfers:
        return Begun([])
    if not group.supports_coalescing:
        return Begun([_begin(group, transfer) for transfer in transfers])
    group._start_coalescing()
    try:
        for transfer in transfers:
            _begin(group, transfer)
    finally:  # otherwise, later NCCL calls of any group would join the batch
        work = group._end_coalescing()
    return Begun([work])


def _begin(group: Any, transfer: Transfer) -> Any:
    return (group.send if transfer.sends else group.recv)([transfer.tensor], transfer.peer, 0)
