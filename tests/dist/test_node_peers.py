"""Ranks of a node that watch each other; test_bootstrap.py has a whole run."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from hpcrl.messaging.messages import Lost
from hpcrl.messaging.node_peers import NodePeerWatch
from hpcrl.messaging.processes import born, state

RENAMED = r"printf '\xfc) Z (' > /proc/$$/comm; read -r"
"""A process of a name that is neither UTF-8 nor easy to tell from what follows it."""
pytestmark = pytest.mark.timeout(60)


class Sender:
    def __init__(self) -> None:
        self.sent: Queue[Lost] = Queue()

    def send(self, queue: str, message: Lost) -> None:
        self.sent.put(message)


def test_the_next_living_rank_is_watched_whatever_its_process_name() -> None:
    """Ranks 1 to 4 of this host; another process, which must not be touched, has reused rank 1's pid."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    ranks = {rank: subprocess.Popen(["bash", "-c", RENAMED], stdin=subprocess.PIPE) for rank in (1, 2, 3, 4)}
    sender = Sender()
    world: Any = SimpleNamespace(store=store, rank=0, size=6, host="here", sender=sender)
    for rank, process in ranks.items():
        store.set(f"process/{rank}", f"{process.pid} {born(process.pid) if rank > 1 else '17'} here")
    store.set("process/5", f"{os.getpid()} {born(os.getpid())} elsewhere")
    try:
        while b"\xfc" not in (renamed := Path(f"/proc/{ranks[2].pid}/comm").read_bytes()):
            time.sleep(0.01)
        assert renamed == b"\xfc) Z (\n"
        ranks[1].send_signal(19)
        ranks[2].send_signal(19)
        NodePeerWatch(world, stopped_s=0.8, start_s=10)
        lost = sender.sent.get(timeout=20)
        assert (lost.rank, lost.silent) == (2, True) and lost.cause.startswith("was stopped (SIGSTOP) for ")
        ranks[3].kill()
        ranks[4].send_signal(19)
        assert sender.sent.get(timeout=20).rank == 4, "its watcher, rank 3, is gone"
        assert ranks[2].wait(10) == ranks[4].wait(10) == -9 and sender.sent.empty()
        assert state(ranks[1].pid) == "stopped"
    finally:
        for process in ranks.values():
            process.kill()
            process.wait()


def test_an_ended_process_that_nobody_reaped_counts_as_gone() -> None:
    process = subprocess.Popen(["true"])
    began = time.monotonic()
    while state(process.pid) != "gone":
        assert time.monotonic() - began < 20
        time.sleep(0.01)
    process.wait()
    assert born(process.pid) == ""
