"""Decoding speed of each replica, from the durations of its decode chunks."""

from __future__ import annotations

from statistics import median_low

from hpcrl.rollout.scheduling.events import SpeedChanged

MEMORY = 0.1
"""Weight of a new decode chunk in a replica's mean."""
COMMON_MEMORY = 0.01
"""Weight of a new decode chunk in the line common to all replicas."""
MIN_CHANGE = 0.25
"""Relative change of a speed above which it is reported."""
LOOKS = 8
"""Comparisons of all speeds while every replica ends one decode chunk."""


class ReplicaSpeeds:
    """Speeds relative to the median replica. A line fitted to all decode chunks gives the duration for a number of
    tokens; a replica's slowness is the ratio of its durations to that line."""

    def __init__(self) -> None:
        self._line = _Line()
        self._slowness: dict[int, float] = {}
        self._told: dict[int, float] = {}
        self._unseen = 0  # decode chunks since the last comparison

    def observe(self, replica: int, tokens: int, seconds: float) -> list[SpeedChanged]:
        """Add a replica's decode chunk; returns the speeds that have changed, if they are compared now."""
        self._line.observe(tokens, seconds)
        excess = seconds / max(self._line.at(tokens), 1e-9)
        before = self._slowness.get(replica, excess)
        self._slowness[replica] = before + MEMORY * (excess - before)
        self._unseen += 1
        if self._unseen * LOOKS < len(self._slowness):
            return []
        self._unseen = 0
        middle = median_low(self._slowness.values())  # of two, the faster
        speeds = {name: middle / max(slowness, 1e-9) for name, slowness in self._slowness.items()}
        changed = {n: speed for n, speed in speeds.items() if abs(speed / self._told.get(n, 1.0) - 1.0) > MIN_CHANGE}
        self._told |= changed
        return [SpeedChanged(name, speed) for name, speed in sorted(changed.items())]

    def forget(self, replica: int) -> None:
        """Remove a lost replica."""
        self._slowness.pop(replica, None)


class _Line:
    """Seconds over tokens by least squares; older decode chunks count less."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, x: float, y: float) -> None:
        kept = 1.0 - COMMON_MEMORY
        self._weight, self._x, self._y = kept * self._weight + 1.0, kept * self._x + x, kept * self._y + y
        self._xx, self._xy = kept * self._xx + x * x, kept * self._xy + x * y

    def at(self, x: float) -> float:
        """Seconds for x tokens, never negative and never falling with x."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x**2
        slope = (self._xy / self._weight - mean_x * mean_y) / spread if spread > 1e-9 * mean_x**2 else 0.0
        slope = min(max(0.0, slope), mean_y / mean_x if mean_x else 0.0)  # between constant and proportional
        return mean_y + slope * (x - mean_x)
