"""Access of rewards to serving ranks of the run: addresses, token, and choice of the least busy replica."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import msgspec

LOAD_HEADER = "X-Hpcrl-In-Flight"
"""Answer header with the rank's number of open requests."""
DOWN_S = 5.0
"""Time for which a replica that does not answer is avoided."""


class Services(msgspec.Struct, frozen=True, array_like=True):
    """The ranks that serve models.

    Args:
        urls: Role -> address of each of its ranks.
        models: Role -> properties that determine its answers (path, engine, type), a part of their cache key.
        token: The run's token.
        seed: Seed of a deterministic run, whose requests must be equal at every start; None in other runs.
        seeing: Roles whose models take images.
    """

    urls: dict[str, list[str]] = {}
    models: dict[str, str] = {}
    token: str = ""
    seed: int | None = None
    seeing: list[str] = []

    def of(self, role: str) -> list[str]:
        """The addresses of a role. ValueError if the run has none."""
        if not self.urls.get(role):
            raise ValueError(f"the reward needs ranks of the role {role}, which only a run has")
        return self.urls[role]


NOBODY = Services()
"""No serving ranks, outside a run."""


class Addresses:
    """The addresses of one model's replicas. Thread-safe."""

    def __init__(self, urls: Sequence[str]):
        self._open = dict.fromkeys(urls, 0)  # requests of this process
        self._told = dict.fromkeys(urls, 0)  # open requests of all processes, from the last answer
        self._down_until = dict.fromkeys(urls, 0.0)  # monotonic time
        self._lock = threading.Lock()

    def take(self) -> str:
        """Choose the least busy replica that answers; the caller must call done() after the request."""
        with self._lock:
            now = time.monotonic()
            url = min(self._open, key=lambda u: (self._down_until[u] > now, max(self._open[u], self._told[u])))
            # Moved to the end, so replicas with equally few requests take turns.
            self._open[url] = self._open.pop(url) + 1
            return url

    def done(self, url: str, told: int | None = None, down_s: float = 0.0) -> None:
        """Record a request's end. told: open requests that the replica reported; down_s: time to avoid the replica."""
        with self._lock:
            self._open[url] -= 1
            self._down_until[url] = time.monotonic() + down_s
            self._told[url] = told if told is not None else 0

    def any_up(self) -> bool:
        """Whether at least one replica is not being avoided."""
        with self._lock:
            now = time.monotonic()
            return any(until <= now for until in self._down_until.values())
