"""Every rank exits when the control store is gone, even while it computes or waits.

A store call to a host that no longer answers does not return (torch 2.13), and a rank in a long command makes no calls.
So one thread polls the store with its own client, and another thread checks the answers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

from torch.distributed import TCPStore

from hpcrl.messaging.bootstrap import WORLD_KEY
from hpcrl.system.exit_codes import ExitCode

logger = logging.getLogger(__name__)

ROUNDS = 10  # polls per deadline


class StoreWatch:
    """Ends this process with ExitCode.STORE_LOST and a message when `store`, which nothing else may use, breaks or does
    not answer for deadline_s. `doing` returns the rank's activity, for the message."""

    def __init__(self, store: TCPStore, doing: Callable[[], str], deadline_s: float):
        self._store, self._doing, self._deadline_s = store, doing, deadline_s
        self._stopped = threading.Event()
        self._answers = 0
        for target in (self._ask, self._judge):
            threading.Thread(target=target, name="store watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching: the store may end from now on."""
        self._stopped.set()

    def _ask(self) -> None:
        while not self._stopped.wait(self._deadline_s / ROUNDS):
            try:
                self._store.check([WORLD_KEY])
            except RuntimeError:
                self._end("is gone")
            self._answers += 1

    def _judge(self) -> None:
        # Counts its own rounds, not seconds: a process could not receive while it was suspended, or while native code
        # held the interpreter lock.
        heard, silent = 0, 0
        while not self._stopped.wait(self._deadline_s / ROUNDS):
            heard, silent = self._answers, silent + 1 if self._answers == heard else 0
            if silent > ROUNDS - 2:  # a poll may just have begun, and a round takes a little longer
                self._end(f"has not answered for {self._deadline_s:g} s")

    def _end(self, what: str) -> None:
        if not self._stopped.is_set():
            with contextlib.suppress(OSError):  # the log's reader may have ended, too
                logger.error("the control store %s (while in %s)", what, self._doing())
            os._exit(ExitCode.STORE_LOST)
