"""A rank without work leaves the controller's store alone, and still answers at once."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from hpcrl.control.messages import BuildRole, Done, Leave, Observed, Turn
from hpcrl.control.world import rank_queue
from tests.dist.conftest import Threads
from tests.roles.conftest import Stage

AT_ONCE_S = 0.4  # an idle rank looks by itself every second


class CountingStore:
    """A store client that counts how often its queues are asked."""

    def __init__(self, store: Any):
        self._store, self.num_calls = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def queue_pop(self, *arguments: Any, **options: Any) -> bytes:
        self.num_calls += 1
        return self._store.queue_pop(*arguments, **options)


def answer(threads: Threads) -> tuple[Any, float]:
    """The next event at rank 0 and the seconds it took."""
    started = time.monotonic()
    while (message := threads.worlds[0].events.get(0.5)) is None:
        assert time.monotonic() < started + 30
    return message[2], time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize("role", ["env", "reward"])
def test_an_idle_rank_asks_nobody_and_answers_at_once(threads: Threads, stage: Stage, role: str) -> None:
    rank = {"env": 1, "reward": 2}[role]
    world, sender = threads.worlds[rank], threads.worlds[0].sender
    world.commands._store = store = CountingStore(world.commands._store)
    worker = stage.worker(rank, {"env": {"default": {"name": "scripted"}}})
    serving = threading.Thread(target=worker.serve)
    serving.start()
    try:
        answer(threads)  # it has joined
        sender.send(rank_queue(rank), BuildRole(role, [rank]))
        assert isinstance(answer(threads)[0], Done)
        time.sleep(0.2)
        before = store.num_calls
        time.sleep(1)
        assert store.num_calls - before <= 2  # 10 with a look every 100 ms, thousands with the back-off there once was
        if role == "env":
            meta = json.dumps({"prompt": "?", "answer": "4", "messages": [], "tools": None, "extra": {}}).encode()
            stage.send(2, 1, [Turn(5, "maths", "", meta, "stop", 2, 2, 100, begins=True)])
            event, seconds = answer(threads)
            assert isinstance(event, Observed) and seconds < AT_ONCE_S
            time.sleep(1.5)
    finally:
        sender.send(rank_queue(rank), Leave())
    event, seconds = answer(threads)
    assert isinstance(event, Done) and seconds < AT_ONCE_S
    serving.join(5)
    assert not serving.is_alive()
    worker.close()
