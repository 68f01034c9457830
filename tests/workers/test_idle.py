"""A rank without work sleeps and still answers at once."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from hpcrl.messaging.mailbox_server import Arrival
from hpcrl.messaging.messages import BuildRole, Done, Observed, Shutdown, Turn
from hpcrl.messaging.world import rank_queue
from tests.dist.conftest import Threads
from tests.workers.conftest import Stage

AT_ONCE_S = 0.4  # an idle rank polls every second


class Counting:
    """An inbox that counts how often it is read."""

    def __init__(self, inbox: Any):
        self._inbox, self.num_calls = inbox, 0

    def get(self, timeout_s: float = 0.0) -> Any:
        self.num_calls += 1
        return self._inbox.get(timeout_s)

    def take_ended(self) -> Any:
        return self._inbox.take_ended()


def answer(threads: Threads) -> tuple[Any, float]:
    """The next event at rank 0 and the seconds it took."""
    started = time.monotonic()
    while (message := threads.worlds[0].events.get(0.5)) is None:
        assert time.monotonic() < started + 30
    return message[2], time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize("role", ["env", "reward"])
def test_an_idle_rank_sleeps_and_answers_at_once(threads: Threads, stage: Stage, role: str) -> None:
    rank = {"env": 1, "reward": 2}[role]
    world, sender = threads.worlds[rank], threads.worlds[0].sender
    world.commands = inbox = Counting(world.commands)
    worker = stage.worker(rank, {"env": {"default": {"name": "scripted"}}})
    serving = threading.Thread(target=worker.serve)
    serving.start()
    try:
        answer(threads)  # it has joined
        sender.send(rank_queue(rank), BuildRole(role, [rank]))
        assert isinstance(answer(threads)[0], Done)
        time.sleep(1.2)  # it polls ever less often
        before = inbox.num_calls
        time.sleep(1)
        assert inbox.num_calls - before <= 2  # 10 when polling every 100 ms
        if role == "env":
            meta = json.dumps({"prompt": "?", "answer": "4", "messages": [], "tools": None, "extra": {}}).encode()
            stage.send(2, 1, [Turn(5, "maths", "", meta, "stop", 2, 2, 100, starts_episode=True)])
            event, seconds = answer(threads)
            assert isinstance(event, Observed) and seconds < AT_ONCE_S
            time.sleep(1.5)
    finally:
        for _ in range(3000):  # of messages that others may send
            world.mailbox_server.queue(rank_queue(rank)).put(Arrival(0, b"noise"))
        sender.send(rank_queue(rank), Shutdown())
    event, seconds = answer(threads)
    assert isinstance(event, Done) and seconds < AT_ONCE_S
    serving.join(5)
    assert not serving.is_alive()
    worker.close()
