"""Without an agent (torchrun, MPI, one Slurm task per rank), a node's ranks watch each other and their launcher.

Nothing else would notice a rank stopped by a signal: its connections stay open, and its kernel answers. Nor would
anything end the ranks whose launcher was killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from hpcrl.messaging.messages import Lost
from hpcrl.messaging.processes import born, state
from hpcrl.messaging.queues import ReaderLost
from hpcrl.messaging.world import CONTROLLER_QUEUE, World
from hpcrl.system.clock import AwakeClock

logger = logging.getLogger(__name__)

LOOKS = 8  # polls within stopped_s


class NodePeerWatch:
    """Kills this node's next living rank, and notifies the controller, when a signal has stopped that rank for
    stopped_s. Ends this process when its launcher has ended."""

    def __init__(self, world: World, stopped_s: float, start_s: float):
        """Every rank must create one within start_s."""
        world.store.set(_key(world.rank), f"{os.getpid()} {born(os.getpid())} {world.host}")
        self._world, self._stopped_s, self._start_s, self._parent = world, stopped_s, start_s, os.getppid()
        threading.Thread(target=self._watch, name="sibling watch", daemon=True).start()

    def _watch(self) -> None:
        try:
            others = self._others()
        except RuntimeError:  # the store is gone; StoreWatch ends this process
            return
        clock, pause, runs_s, watched = AwakeClock(self._stopped_s), threading.Event(), 0.0, 0
        while not pause.wait(self._stopped_s / LOOKS):
            if os.getppid() != self._parent:
                with contextlib.suppress(OSError):  # the launcher may have read the log
                    logger.error("the launcher of this rank has ended")
                os.kill(os.getpid(), signal.SIGKILL)
            seen = ((rank, pid, state(pid, began)) for rank, pid, began in others)
            rank, pid, found = next((one for one in seen if one[2] != "gone"), (self._world.rank, 0, "runs"))
            if found == "runs" or pid != watched:
                runs_s, watched = clock.now(), pid
            elif clock.now() - runs_s > self._stopped_s:
                self._end(rank, pid, f"was stopped (SIGSTOP) for {clock.now() - runs_s:.0f} s")

    def _end(self, rank: int, pid: int, cause: str) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)
        logger.warning("killed rank %d, which %s", rank, cause)
        with contextlib.suppress(ReaderLost):  # of rank 0 itself
            self._world.sender.send(CONTROLLER_QUEUE, Lost(rank, cause, silent=True))

    def _others(self) -> Sequence[tuple[int, int, str]]:
        """(rank, process id, start time) of this node's other ranks, starting after this one, in cyclic order."""
        own: Any = self._world.store  # torch's stubs lack clone()
        store = own.clone()  # a waiting client is locked
        store.set_timeout(timedelta(seconds=self._start_s))
        told = [text.decode().split(maxsplit=2) for text in store.multi_get([_key(r) for r in range(self._world.size)])]
        here = [(rank, int(pid), began) for rank, (pid, began, host) in enumerate(told) if host == self._world.host]
        return [one for one in here if one[0] > self._world.rank] + [one for one in here if one[0] < self._world.rank]


def _key(rank: int) -> str:
    return f"process/{rank}"
