"""Time that does not pass while Slurm suspends the job, for deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

SHARE = 4
UNCOUNTED = timedelta(days=30)
"""Timeout of an engine's collectives. The controller's deadline for the command ends a wait long before; timeouts of
gloo and NCCL would count time during which the job is suspended."""


class AwakeClock:
    """Seconds since the clock was made, for deadlines of `deadline_s` in a process that reads the clock several times
    within a deadline.

    Time between two reads counts for at most a quarter of the deadline: more time passes only if the process was
    stopped or blocked.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic):
        self._clock, self._most_s = clock, deadline_s / SHARE
        self._looked, self._counted = clock(), 0.0

    def now(self) -> float:
        """The time."""
        before, self._looked = self._looked, self._clock()
        self._counted += min(self._looked - before, self._most_s)
        return self._counted
