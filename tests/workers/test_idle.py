"""A rank without work sleeps and still answers at once."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from hpcrl.messaging.mailbox_server import Arrival
from hpcrl.messaging.messages import BuildRole, Done, Observed, Shutdown, Turn
from hpcrl.messaging.world import rank_queue
from hpcrl.workers.rank_loop import IDLE_MOST_S
from tests.dist.conftest import Threads
from tests.workers.conftest import Stage


class Wakeup:
    """A rank's event for arrivals. Where the rank would wait longest, it waits until it is woken, without a limit: it
    answers only if the message has woken it, however busy the machine is."""

    def __init__(self, event: threading.Event):
        self._event, self.num_waits, self.sleeps = event, 0, threading.Event()
        self.set, self.clear = event.set, event.clear

    def wait(self, timeout_s: float) -> bool:
        self.num_waits += 1
        if timeout_s < IDLE_MOST_S:
            return self._event.wait(timeout_s)
        self.sleeps.set()
        return self._event.wait()


def answer(threads: Threads) -> Any:
    """The next event at rank 0."""
    message = threads.worlds[0].events.get(30)
    assert message is not None, "nothing has woken the rank"
    return message[2]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["env", "reward"])
def test_an_idle_rank_sleeps_and_answers_at_once(
    threads: Threads, stage: Stage, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = {"env": 1, "reward": 2}[role]
    world, sender = threads.worlds[rank], threads.worlds[0].sender
    server = world.mailbox_server
    monkeypatch.setattr(server, "wakeup", wakeup := Wakeup(server.wakeup))
    worker = stage.worker(rank, {"env": {"default": {"name": "scripted"}}})
    serving = threading.Thread(target=worker.serve)
    serving.start()
    try:
        answer(threads)  # it has joined
        before = wakeup.num_waits
        wakeup.sleeps.clear()
        sender.send(rank_queue(rank), BuildRole(role, [rank]))
        assert isinstance(answer(threads), Done)
        assert wakeup.sleeps.wait(30) and wakeup.num_waits - before < 50, "it polls ever less often"
        if role == "env":
            meta = json.dumps({"prompt": "?", "answer": "4", "messages": [], "tools": None, "extra": {}}).encode()
            wakeup.sleeps.clear()
            stage.send(2, 1, [Turn(5, "maths", "", meta, "stop", 2, 2, 100, starts_episode=True)])
            assert isinstance(answer(threads), Observed) and wakeup.sleeps.wait(30)
    finally:
        for _ in range(3000):  # of messages that others may send
            world.mailbox_server.queue(rank_queue(rank)).put(Arrival(0, b"noise"))
        sender.send(rank_queue(rank), Shutdown())
    assert isinstance(answer(threads), Done)
    serving.join(20)
    assert not serving.is_alive()
    worker.close()
