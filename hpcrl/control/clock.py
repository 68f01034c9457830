"""Time that a process was let run: where Slurm suspends a job, its deadlines go on when it wakes as they were."""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 4


class AwakeClock:
    """Seconds since it was made, for deadlines of `deadline_s` in a process that looks at it several times in that.

    What passes between two looks counts for a quarter of the deadline at most: more passes where the process was
    stopped or held up, and has not listened meanwhile.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic):
        self._clock, self._most_s = clock, deadline_s / SHARE
        self._looked, self._counted = clock(), 0.0

    def now(self) -> float:
        """The time."""
        before, self._looked = self._looked, self._clock()
        self._counted += min(self._looked - before, self._most_s)
        return self._counted
