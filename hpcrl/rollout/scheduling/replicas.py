"""The living replicas and their load, and samples that wait for their first replica."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping

from hpcrl.rollout.scheduling.groups import LiveSample


class Replica:
    __slots__ = ("acting", "answered", "capacity", "load", "paused", "running", "samples", "speed")

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.paused = False  # busy with other work
        self.speed = 1.0  # of decoding, relative to the median replica
        self.running = 0  # samples in a slot, or waiting in the engine for one
        self.load = 0.0  # sum of their expected lengths (each 1 if lengths do not count)
        self.acting = 0  # samples whose environment acts
        self.answered: deque[int] = deque()  # samples whose next turn waits for a slot, in order of arrival
        self.samples: set[int] = set()  # all samples whose tokens it holds

    @property
    def room(self) -> int:
        """Number of samples it may get; a slow replica gets fewer. Below 0 if samples queue in the engine
        (DeterministicMode)."""
        return 0 if self.paused else max(1, int(self.capacity * min(1.0, self.speed))) - self.running

    @property
    def key(self) -> float:
        """Its work beyond its capacity, in units of samples. The replica with the lowest key gets the next sample."""
        return self.load - max(1.0, self.capacity * min(1.0, self.speed))


class Replicas(dict[int, Replica]):
    """The living replicas by rank. Only occupy() changes `running`."""

    def __init__(self, capacities: Mapping[int, int]):
        if not capacities or min(capacities.values()) < 1:
            raise ValueError(f"rollouts need generator replicas with room for requests, got {dict(capacities)}")
        super().__init__((name, Replica(capacity)) for name, capacity in sorted(capacities.items()))
        self._paused: frozenset[int] = frozenset()
        self._by_key: list[tuple[float, int]] = []  # heap of (key, replica); outdated entries are skipped
        self._rebuild()

    def occupy(self, name: int, change: int, weight: float) -> None:
        """Record that `change` more samples (1 or -1) of this expected length run on a replica."""
        replica = self[name]
        replica.running += change
        replica.load = replica.load + change * weight if replica.running else 0.0  # avoids rounding drift
        self._touch(name)

    def tell_speed(self, name: int, speed: float) -> None:
        """Set the decoding speed of a replica, relative to the median."""
        self[name].speed = speed
        self._touch(name)

    def pause(self, names: frozenset[int]) -> list[int]:
        """Pause exactly these replicas; returns the replicas that are no longer paused."""
        before, self._paused = self._paused, names
        for name in before ^ names:
            if name in self:
                self[name].paused = name in names
                self._touch(name)
        return [name for name in before - names if name in self]

    def lightest(self) -> int | None:
        """The least loaded replica with room, the first of equals; None if none has room."""
        while self._by_key:
            key, name = self._by_key[0]
            if name in self and self[name].key == key and self[name].room > 0:
                return name
            heapq.heappop(self._by_key)
        return None

    def _touch(self, name: int) -> None:
        if self[name].room > 0:
            heapq.heappush(self._by_key, (self[name].key, name))
            if len(self._by_key) > 4 * len(self):
                self._rebuild()

    def _rebuild(self) -> None:
        self._by_key = [(replica.key, name) for name, replica in self.items() if replica.room > 0]
        heapq.heapify(self._by_key)


class Waiting:
    """Waiting samples in order of their ids: old prompts first, group members together."""

    def __init__(self, living: Mapping[int, LiveSample]):
        self._living = living  # all other samples are skipped
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
