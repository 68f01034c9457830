"""Without an agent (torchrun, MPI, a Slurm task for each rank) the ranks of a node watch each other.

Nothing else would notice that a signal has stopped one of them: its connections stay, and its kernel answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from datetime import timedelta
from typing import Any

from hpcrl.clock import AwakeClock
from hpcrl.control.messages import Lost
from hpcrl.control.processes import is_stopped, rank_name
from hpcrl.control.queues import ReaderLost
from hpcrl.control.world import CONTROLLER_QUEUE, World

LOOKS = 8  # in the time that a rank may be stopped


class SiblingWatch:
    """Kills the next rank of this node, and tells the controller, when a signal has stopped it for stopped_s."""

    def __init__(self, world: World, stopped_s: float, start_s: float):
        """Every rank makes one; start_s: until the last one has."""
        world.store.set(f"process/{world.rank}", f"{os.getpid()} {world.host}")
        self._world, self._stopped_s, self._start_s = world, stopped_s, start_s
        threading.Thread(target=self._watch, name="sibling watch", daemon=True).start()

    def _watch(self) -> None:
        try:
            rank, pid = self._next()
        except RuntimeError:  # the store is gone, which ends this process
            return
        if rank == self._world.rank:  # alone on its node
            return
        clock, pause, runs_s = AwakeClock(self._stopped_s), threading.Event(), 0.0
        while not pause.wait(self._stopped_s / LOOKS):
            if not is_stopped(pid, rank_name(rank)):
                runs_s = clock.now()
            elif clock.now() - runs_s > self._stopped_s:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)
                cause = f"was stopped (SIGSTOP) for {clock.now() - runs_s:.0f} s"
                print(f"hpcrl rank {self._world.rank}: killed rank {rank}, which {cause}", flush=True)
                with contextlib.suppress(ReaderLost):  # of rank 0 itself
                    self._world.sender.send(CONTROLLER_QUEUE, Lost(rank, cause, silent=True))
                return

    def _next(self) -> tuple[int, int]:
        """The next rank of this node, the first after the last, and its process."""
        own: Any = self._world.store  # torch's stubs lack clone()
        store = own.clone()  # a client that waits is locked
        store.set_timeout(timedelta(seconds=self._start_s))
        told = [store.get(f"process/{rank}").decode().split(maxsplit=1) for rank in range(self._world.size)]
        here = [rank for rank, (_, host) in enumerate(told) if host == self._world.host]
        following = here[(here.index(self._world.rank) + 1) % len(here)]
        return following, int(told[following][0])
