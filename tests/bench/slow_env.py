"""Environments that answer late, for benches: a normal latency, and now and then ten times as much."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections import Counter
from typing import Any, ClassVar

SLOW_FACTOR = 10.0

_begun: Counter[int] = Counter()


def episode_rng(seed: int) -> random.Random:
    """What chance decides in an episode, so that both sides of a comparison meet the same: a function of the seed and
    of how many episodes with it began before in this process, since siblings have one seed."""
    _begun[seed] += 1
    return random.Random(f"{seed}/{_begun[seed]}")


class SlowEnv:
    """Each turn takes N(mean_s, std_s), the share `slow` of them ten times that; `turns` turns, reward at random."""

    def __init__(self, answer: Any = "", mean_s: float = 0.1, std_s: float = 0.03, slow: float = 0.01, turns: int = 3):
        self._mean_s, self._std_s, self._slow, self._turns = mean_s, std_s, slow, turns
        self._rng, self._turn = random.Random(0), 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._rng, self._turn = episode_rng(seed), 0
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turn += 1
        latency_s = max(0.0, self._rng.gauss(self._mean_s, self._std_s))
        time.sleep(latency_s * (SLOW_FACTOR if self._rng.random() < self._slow else 1.0))
        return "go on", float(self._rng.random() < 0.5), self._turn == self._turns, False, {}


class LateEnv:
    """The same as coroutines, with the laws of tests.bench.flash.settings.Latency: a share of the episodes is slow in
    all turns, another hangs in one of them. together: turns end together with those of so many episodes (lockstep);
    otherwise `gap_ms` is the median time between the return of step() and the next call.
    """

    runs_in = "task"
    meetings: ClassVar[dict[int, asyncio.Barrier]] = {}

    def __init__(
        self,
        mean_s: float = 0.0,
        std_s: float = 0.0,
        slow_share: float = 0.0,
        hung_share: float = 0.0,
        turns: int = 5,
        together: int = 0,
    ):
        self._turn, self._turns, self._together = 0, turns, together
        self._mean_s, self._std_s, self._slow_share, self._hung_share = mean_s, std_s, slow_share, hung_share
        self._returned_at, self._gaps = 0.0, list[float]()

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._rng = episode_rng(seed)
        self._factor = SLOW_FACTOR if self._rng.random() < self._slow_share else 1.0
        self._hangs_at = self._rng.randint(1, self._turns) if self._rng.random() < self._hung_share else 0
        return "", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turn += 1
        if self._turn > 1:
            self._gaps.append(time.perf_counter() - self._returned_at)
        latency_s = self._factor * max(0.0, self._rng.gauss(self._mean_s, self._std_s))
        if latency_s or self._turn == self._hangs_at:
            await asyncio.sleep(math.inf if self._turn == self._hangs_at else latency_s)
        if self._together:
            await self.meetings.setdefault(self._together, asyncio.Barrier(self._together)).wait()
        self._returned_at = time.perf_counter()
        gap = {"gap_ms": 1e3 * statistics.median(self._gaps)} if self._gaps else {}
        return "go on", float(self._rng.random() < 0.5), self._turn == self._turns, False, {"metrics": gap}
