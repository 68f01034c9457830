"""Room on the generator replicas: who has the most of it, found without scanning them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping


class Replica:
    """What the scheduler knows of one replica."""

    __slots__ = ("acting", "answered", "capacity", "running", "samples")

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.running = 0  # samples that occupy a slot or wait in the engine for one
        self.acting = 0  # samples whose environment acts
        self.answered: deque[int] = deque()  # samples whose next turn waits for a slot, first come first
        self.samples: set[int] = set()  # everything whose tokens live here

    @property
    def room(self) -> int:
        """Negative in deterministic mode, where the engine queues what its slots do not hold."""
        return self.capacity - self.running


class Replicas(dict[int, Replica]):
    """The living replicas by rank. `running` is changed through occupy() alone."""

    def __init__(self, capacities: Mapping[int, int]):
        if not capacities or min(capacities.values()) < 1:
            raise ValueError(f"rollouts need generator replicas with room for requests, got {dict(capacities)}")
        super().__init__((name, Replica(capacity)) for name, capacity in sorted(capacities.items()))
        self._by_room: list[tuple[int, int]] = []  # heap of (-room, replica); entries that no longer hold are skipped
        self._rebuild()

    def occupy(self, name: int, change: int) -> None:
        """`change` more samples run on a replica."""
        self[name].running += change
        heapq.heappush(self._by_room, (-self[name].room, name))
        if len(self._by_room) > 4 * len(self):
            self._rebuild()

    def roomiest(self) -> int:
        """The replica with the most room, the first of equals."""
        while True:
            room, name = self._by_room[0]
            if name in self and self[name].room == -room:
                return name
            heapq.heappop(self._by_room)

    def _rebuild(self) -> None:
        self._by_room = [(-replica.room, name) for name, replica in self.items()]
        heapq.heapify(self._by_room)
