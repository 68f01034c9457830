"""Load metrics of a rank that serves requests."""

from __future__ import annotations

import time

from hpcrl.metrics.stats import Stat, Stats, scalar


class Load:
    """Measures the time with open requests, and their number over time, since the last take(). `slots` is the maximum
    number of requests processed at once."""

    def __init__(self, role: str, slots: int):
        self._role, self._slots = role, slots
        self._open, self._since = 0, time.monotonic()
        self._num_answered = self._most = 0
        self._total_s = self._busy_s = self._request_s = self._slot_s = 0.0

    def note(self, num_open: int) -> None:
        """Record that `num_open` requests are open from now on."""
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self._total_s += seconds
        if self._open:
            self._busy_s += seconds
            self._request_s += seconds * self._open
            self._slot_s += seconds * min(self._open, self._slots)
        self._most, self._open = max(self._most, num_open), num_open

    def answered(self, count: int) -> None:
        """Record that `count` requests were answered."""
        self._num_answered += count

    def take(self, refused: int) -> Stats:
        """Metrics since the last call: the fraction of time with open requests; the mean and maximum number of requests
        and the fraction of used slots in that time; the requests answered and refused, averaged over ranks."""
        self.note(self._open)
        role, answered, most = self._role, self._num_answered, self._most
        found = {
            f"{role}/busy": Stat(self._busy_s, self._total_s),
            f"{role}/in_flight/mean": Stat(self._request_s, self._busy_s),
            f"{role}/in_flight/max^": scalar(most),
            f"{role}/slots_used": Stat(self._slot_s, self._busy_s * self._slots),
            f"{role}/answered": scalar(answered),
            f"{role}/refused": scalar(refused),
        }
        self._total_s = self._busy_s = self._request_s = self._slot_s = 0.0
        self._most, self._num_answered = self._open, 0
        return found
