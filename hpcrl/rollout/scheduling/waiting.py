"""Samples that wait for their first replica."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from hpcrl.rollout.scheduling.groups import LiveSample


class Waiting:
    """Waiting samples in order of their ids: old prompts first, siblings together."""

    def __init__(self, living: Mapping[int, LiveSample]):
        self._living = living  # others are skipped
        self._heap: list[int] = []
        self.size = 0  # living samples that wait; the caller subtracts dropped ones

    def add(self, sample: LiveSample) -> None:
        self.size += 1
        heapq.heappush(self._heap, sample.id)

    def head(self) -> LiveSample | None:
        """The next sample to route; None if none waits."""
        while self._heap:
            if (sample := self._living.get(self._heap[0])) is not None:
                return sample
            heapq.heappop(self._heap)
        return None

    def pop(self) -> LiveSample:
        """Remove and return head()."""
        sample = self.head()
        assert sample is not None
        self.size -= 1
        heapq.heappop(self._heap)
        return sample
