"""The living replicas, and what each carries."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping


class Replica:
    """What the scheduler knows of one replica."""

    __slots__ = ("acting", "answered", "capacity", "load", "paused", "running", "samples", "speed")

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.paused = False  # it has other work to do for a while
        self.speed = 1.0  # of its decoding, relative to the median replica's
        self.running = 0  # samples that occupy a slot or wait in the engine for one
        self.load = 0.0  # of these, the sum of expected lengths (each 1 where lengths do not count)
        self.acting = 0  # samples whose environment acts
        self.answered: deque[int] = deque()  # samples whose next turn waits for a slot, first come first
        self.samples: set[int] = set()  # everything whose tokens live here

    @property
    def room(self) -> int:
        """Samples it may be given; a slow replica gets less. Negative in deterministic mode, where the engine queues
        what its slots do not hold."""
        return 0 if self.paused else max(1, int(self.capacity * min(1.0, self.speed))) - self.running

    @property
    def key(self) -> float:
        """The lower, the sooner it gets a sample: the work it has beyond what it can hold, in units of samples."""
        return self.load - max(1.0, self.capacity * min(1.0, self.speed))


class Replicas(dict[int, Replica]):
    """The living replicas by rank. `running` is changed through occupy() alone."""

    def __init__(self, capacities: Mapping[int, int]):
        if not capacities or min(capacities.values()) < 1:
            raise ValueError(f"rollouts need generator replicas with room for requests, got {dict(capacities)}")
        super().__init__((name, Replica(capacity)) for name, capacity in sorted(capacities.items()))
        self._paused: frozenset[int] = frozenset()
        self._by_key: list[tuple[float, int]] = []  # heap of (key, replica); entries that no longer hold are skipped
        self._rebuild()

    def occupy(self, name: int, change: int, weight: float) -> None:
        """`change` more samples (1 or -1) of this expected length run on a replica."""
        replica = self[name]
        replica.running += change
        replica.load = replica.load + change * weight if replica.running else 0.0  # no drift of rounding
        self._touch(name)

    def tell_speed(self, name: int, speed: float) -> None:
        """A replica decodes at this speed, relative to the median."""
        self[name].speed = speed
        self._touch(name)

    def pause(self, names: frozenset[int]) -> list[int]:
        """Only these are paused from now on; the ones that no longer are."""
        before, self._paused = self._paused, names
        for name in before ^ names:
            if name in self:
                self[name].paused = name in names
                self._touch(name)
        return [name for name in before - names if name in self]

    def lightest(self) -> int | None:
        """The replica with room that carries least, the first of equals; None where there is no room."""
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
