"""What a reward needs to ask ranks of the run: where they listen, the token, and how a request finds the least busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import msgspec

LOAD_HEADER = "X-Hpcrl-In-Flight"
"""Header of an answer with the number of open requests of the rank."""
DOWN_S = 5.0
"""Time for which other replicas are preferred to one that does not answer."""


class Services(msgspec.Struct, frozen=True, array_like=True):
    """The ranks that serve models. urls: role -> address of each of its ranks; models: role -> what decides its
    answers (path, engine, type), a part of the key under which they are cached; token: of the run; seed: of a
    deterministic run, whose requests must not differ from one start to the next, else None."""

    urls: dict[str, list[str]] = {}
    models: dict[str, str] = {}
    token: str = ""
    seed: int | None = None

    def of(self, role: str) -> list[str]:
        """The addresses of a role. ValueError if the run has none."""
        if not self.urls.get(role):
            raise ValueError(f"it asks ranks of the role {role}, which only a run has")
        return self.urls[role]


NOBODY = Services()
"""Outside a run."""


class Addresses:
    """The addresses behind which one model is served. For several threads at once."""

    def __init__(self, urls: Sequence[str]):
        self._open = dict.fromkeys(urls, 0)  # requests of this process
        self._told = dict.fromkeys(urls, 0)  # of all processes, as the last answer said
        self._down_until = dict.fromkeys(urls, 0.0)  # monotonic time
        self._lock = threading.Lock()

    def take(self) -> str:
        """The replica for the next request: one that answers, with the fewest open requests; done() must follow."""
        with self._lock:
            now = time.monotonic()
            url = min(self._open, key=lambda u: (self._down_until[u] > now, max(self._open[u], self._told[u])))
            # To the end, so that replicas with equally few take turns.
            self._open[url] = self._open.pop(url) + 1
            return url

    def done(self, url: str, told: int | None = None, down_s: float = 0.0) -> None:
        """The request ended. told: open requests of the replica, as it says; down_s: time for which it is avoided."""
        with self._lock:
            self._open[url] -= 1
            self._down_until[url] = time.monotonic() + down_s
            self._told[url] = told if told is not None else 0

    def any_up(self) -> bool:
        """Whether a replica is not avoided."""
        with self._lock:
            now = time.monotonic()
            return any(until <= now for until in self._down_until.values())
