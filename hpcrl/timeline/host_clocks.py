"""Offsets between the monotonic clocks of hosts, from the times of messages.

A command reaches a rank after it was sent, and its answer arrives after the rank has finished. So the offset that turns
the rank's time into rank 0's time is at least `sent - start` and at most `received - end` (Cristian's algorithm, 1989).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class HostClock:
    """Add `offset_s` to a host's time to get rank 0's time; the error is at most `error_s`, without the drift of one
    step. `error_s` is infinite for a host that has answered no command."""

    offset_s: float
    error_s: float


class HostClocks:
    """The bounds of every host's offset. Bounds of the current and the previous step count, because clocks drift."""

    def __init__(self, own: str) -> None:
        """`own` is rank 0's host, on which all processes share one clock."""
        self._own = own
        self._now: dict[str, tuple[float, float]] = {}
        self._before: dict[str, tuple[float, float]] = {}

    def heard(self, host: str, sent: float, start: float, end: float, received: float) -> None:
        """Use one command: sent and received on rank 0's clock, started and ended on the host's."""
        if host != self._own:
            low, high = self._now.get(host, (-math.inf, math.inf))
            self._now[host] = max(low, sent - start), min(high, received - end)

    def take(self) -> dict[str, HostClock]:
        """The clocks of all hosts, at the end of a step."""
        found = {self._own: HostClock(0.0, 0.0)}
        for host in self._now.keys() | self._before.keys():
            low, high = self._now.get(host, (-math.inf, math.inf))
            before = self._before.get(host, (-math.inf, math.inf))
            if max(low, before[0]) <= min(high, before[1]):  # otherwise the clocks have drifted apart since
                low, high = max(low, before[0]), min(high, before[1])
            if math.isfinite(low) and math.isfinite(high):
                found[host] = HostClock((low + high) / 2, abs(high - low) / 2)
        self._before |= self._now
        self._now = {}
        return found
