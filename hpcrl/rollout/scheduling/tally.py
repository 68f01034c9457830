"""Counts and values of a step, as (sum, count, min, max): the fields of hpcrl.metrics.stats.Stat, without its torch."""

from __future__ import annotations

import math
from collections.abc import Iterable


class Tally:
    """`names` are counts that are reported even when nothing happened."""

    def __init__(self, names: Iterable[str]):
        self._names = tuple(names)
        self._values: dict[str, tuple[float, float, float, float]] = {}
        self._counts = dict.fromkeys(self._names, 0)

    def count(self, name: str, number: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + number

    def counted(self, name: str) -> int:
        return self._counts.get(name, 0)

    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def record(self, name: str, value: float) -> None:
        total, count, low, high = self._values.get(name, (0.0, 0.0, math.inf, -math.inf))
        self._values[name] = (total + value, count + 1.0, min(low, value), max(high, value))

    def take(self, prefix: str) -> dict[str, tuple[float, float, float, float]]:
        """Return everything so far under prefix + name, and reset."""
        taken = {prefix + name: (float(n), 1.0, float(n), float(n)) for name, n in self._counts.items()}
        taken |= {prefix + name: value for name, value in self._values.items()}
        self._values, self._counts = {}, dict.fromkeys(self._names, 0)
        return taken
