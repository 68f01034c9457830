"""An OpenEnv server with a test environment; only tests marked `outside` import it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Move(Action):  # type: ignore[misc]
    place: dict[str, int]


class Seen(Observation):  # type: ignore[misc]
    messages: list[dict[str, str]]
    won: bool = False


class Corridor(Environment):  # type: ignore[misc]
    """Ends at the right of a corridor as long as the seed says, and raises left of it."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    at, length = 0, 9

    def reset(self, seed: int | None = None, episode_id: str | None = None, start: int = 0, **kwargs: Any) -> Seen:
        self.at, self.length = start, 2 + (seed or 0) % 7
        return self.seen()

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        if not action.place["by"] + self.at >= 0:
            raise KeyError("no such place")
        self.at += action.place["by"]
        return self.seen()

    def seen(self) -> Seen:
        won = self.at >= self.length
        text = f"{self.at} of {self.length}"
        messages = [{"content": "A corridor."}, {"content": text}]
        return Seen(messages=messages, won=won, done=won, reward=-1.0 if won else None)

    @property
    def state(self) -> State:
        return State(step_count=0)


@contextmanager
def serving(
    environment: Any = Corridor, action: Any = Move, observation: Any = Seen, sessions: int = 8
) -> Iterator[str]:
    """The address of the server; each session has its own environment."""
    app = create_app(environment, action, observation, max_concurrent_envs=sessions)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.force_exit = server.should_exit = True
        thread.join(30)
