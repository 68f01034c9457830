"""An environment that answers late, for benches: a normal latency, and now and then ten times as much."""

from __future__ import annotations

import random
import time
from typing import Any

SLOW_FACTOR = 10.0


class SlowEnv:
    """Each turn takes N(mean_s, std_s), the share `slow` of them ten times that; `turns` turns, reward at random."""

    def __init__(self, answer: Any = "", mean_s: float = 0.1, std_s: float = 0.03, slow: float = 0.01, turns: int = 3):
        self._mean_s, self._std_s, self._slow, self._turns = mean_s, std_s, slow, turns
        self._rng, self._turn = random.Random(0), 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        # Siblings have one seed; their latencies must not be the same.
        self._rng, self._turn = random.Random(f"{seed}/{time.monotonic_ns()}"), 0
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turn += 1
        latency_s = max(0.0, self._rng.gauss(self._mean_s, self._std_s))
        time.sleep(latency_s * (SLOW_FACTOR if self._rng.random() < self._slow else 1.0))
        return "go on", float(self._rng.random() < 0.5), self._turn == self._turns, False, {}
