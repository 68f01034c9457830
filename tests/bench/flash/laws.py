"""Lengths, latencies and rewards of samples: functions of the seed and the sample's id alone.

So every policy meets the same answers, in whatever order it asks for them.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from hpcrl.rollout.types import split_sample_id
from tests.bench.flash.settings import Latency, World

_NORMAL = NormalDist()
_MASK = (1 << 64) - 1


class Outcomes:
    """What will become of each sample of a world."""

    def __init__(self, world: World, seed: int):
        self._world, self._seed = world, seed

    def tokens(self, sample_id: int, turn: int) -> int:
        """Tokens of the sample's answer number `turn`."""
        lengths = self._world.lengths
        if lengths.law == "constant":
            return int(lengths.median)
        uid = split_sample_id(sample_id)[0]
        shared = _NORMAL.inv_cdf(self._uniform("prompt", uid, turn))
        own = _NORMAL.inv_cdf(self._uniform("tokens", sample_id, turn))
        z = math.sqrt(lengths.prompt_share) * shared + math.sqrt(1 - lengths.prompt_share) * own
        if lengths.law == "lognormal":
            size = lengths.median * math.exp(lengths.shape * z)
        elif lengths.law == "pareto":
            size = lengths.median * (2 * _NORMAL.cdf(-z)) ** (-1 / lengths.shape)
        else:
            raise ValueError(f"no length law {lengths.law!r}")
        return max(1, min(lengths.cap, round(size)))

    def environment_s(self, sample_id: int, turn: int) -> float:
        """Seconds the sample's environment takes over this turn; infinite where it hangs."""
        latency = self._world.environment
        assert latency is not None
        if self._uniform("hung", sample_id) < latency.hung_share:
            hangs_at = int(self._uniform("hung at", sample_id) * self._world.turns)
            if turn == hangs_at:
                return math.inf
        return self._latency(latency, "environment", sample_id, turn)

    def reward_s(self, sample_id: int) -> float:
        """Seconds until the sample's reward is known."""
        return self._latency(self._world.reward, "reward", sample_id)

    def score(self, sample_id: int) -> float:
        """0 or 1; the same for all siblings in a share 1 - pass_rate of the attempts at prompts."""
        uid, attempt, _ = split_sample_id(sample_id)
        mixed = self._uniform("mixed", uid, attempt) < self._world.pass_rate
        return float(self._uniform("score", sample_id if mixed else uid, attempt) < 0.5)

    def _latency(self, latency: Latency, *key: str | int) -> float:
        if latency.std_s == 0:
            seconds = latency.mean_s
        else:
            normal = NormalDist(latency.mean_s, latency.std_s)
            below = normal.cdf(0.0)
            seconds = normal.inv_cdf(below + (1 - below) * self._uniform(*key))
        slow = self._uniform("slow", *key[:2]) < latency.slow_share
        return max(0.0, seconds) * (latency.slow_factor if slow else 1.0)

    def _uniform(self, *key: str | int) -> float:
        """In (0, 1): a hash of the seed and the key (splitmix64's finaliser over each part)."""
        state = self._seed
        for part in key:
            state = (state ^ (_STREAMS[part] if isinstance(part, str) else part)) + 0x9E3779B97F4A7C15 & _MASK
            state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
            state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
            state ^= state >> 31
        return (state + 0.5) / 2.0**64 if state >> 11 != (1 << 53) - 1 else 1 - 2.0**-53


_NAMES = ("prompt", "tokens", "hung", "hung at", "environment", "reward", "mixed", "score", "slow")
_STREAMS = {name: 1 + number for number, name in enumerate(_NAMES)}
