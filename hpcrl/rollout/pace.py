"""How fast each replica decodes, from the time that its bursts take."""

from __future__ import annotations

from statistics import median

from hpcrl.rollout.events import Paced

MEMORY = 0.1
"""Weight of a new burst in a replica's mean."""
NEWS = 0.25
"""Relative change of a speed that is worth telling."""
LOOKS = 8
"""Times that speeds are compared while every replica ends one burst: each time costs a look at all of them."""


class Pace:
    """Speeds relative to the median replica. A burst of fewer responses is faster, so that a replica that is given less
    because it is slow gains some of it back; what is left is the machine's own slowness."""

    def __init__(self) -> None:
        self._burst_s: dict[int, float] = {}
        self._told: dict[int, float] = {}
        self._unseen = 0  # bursts since the speeds were compared

    def learn(self, replica: int, seconds: float) -> list[Paced]:
        """A replica's burst took so long; the speeds that have changed, where they are compared now."""
        before = self._burst_s.get(replica, seconds)
        self._burst_s[replica] = before + MEMORY * (seconds - before)
        self._unseen += 1
        if self._unseen * LOOKS < len(self._burst_s):
            return []
        self._unseen = 0
        middle = median(self._burst_s.values())
        speeds = {name: middle / max(burst_s, 1e-9) for name, burst_s in self._burst_s.items()}
        news = {n: speed for n, speed in speeds.items() if abs(speed / self._told.get(n, 1.0) - 1.0) > NEWS}
        self._told |= news
        return [Paced(name, speed) for name, speed in sorted(news.items())]

    def forget(self, replica: int) -> None:
        """The replica is lost."""
        self._burst_s.pop(replica, None)
