"""Progress of reading or writing many bytes: a message every few seconds, with rate and time left."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hpcrl.metrics.duration import duration
from hpcrl.system.log import BARE

logger = logging.getLogger(__name__)

EVERY_S = 5.0


class Pace:
    """`what` is the work as a participle, such as writing; `total` are its bytes."""

    def __init__(self, what: str, total: int, clock: Callable[[], float] = time.monotonic):
        self._what, self._total, self._clock = what, total, clock
        self._done, self._began = 0, clock()
        self._told = self._began

    def add(self, num_bytes: int) -> None:
        """Count bytes; tells progress if the last message was EVERY_S seconds ago."""
        self._done += num_bytes
        now = self._clock()
        if now - self._told < EVERY_S:
            return
        self._told = now
        rate = self._done / (now - self._began)
        left = duration((self._total - self._done) / rate)
        text = f"{self._what} {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {rate / 1e6:,.0f} MB/s, ETA {left}"
        logger.info("%s", text, extra=BARE)

    def summary(self) -> str:
        """Seconds and rate, as text."""
        seconds = max(self._clock() - self._began, 1e-9)
        return f"{duration(seconds)}, {self._done / 1e6 / seconds:,.0f} MB/s"
