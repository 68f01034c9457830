"""Which replica gets a sample: the living replicas, what they carry, and the samples that wait for room on one."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from hpcrl.rollout.groups import LiveSample


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


class Waiting:
    """Samples that wait for their first replica, by id: old prompts first, siblings together."""

    def __init__(self, samples: Mapping[int, LiveSample]):
        self._samples = samples  # the living ones; others are skipped
        self._heap: list[int] = []
        self.size = 0  # living samples that wait; who drops one takes it off

    def add(self, sample: LiveSample) -> None:
        self.size += 1
        heapq.heappush(self._heap, sample.id)

    def head(self) -> LiveSample | None:
        """The sample to route next; None if none waits."""
        while self._heap:
            if (sample := self._samples.get(self._heap[0])) is not None:
                return sample
            heapq.heappop(self._heap)
        return None

    def pop(self) -> LiveSample:
        """head(), which waits no more."""
        sample = self.head()
        assert sample is not None
        self.size -= 1
        heapq.heappop(self._heap)
        return sample

    def spread(self, replicas: Replicas) -> Iterator[tuple[LiveSample, int]]:
        """Every waiting sample with a replica, in equal runs by sample id."""
        waiting = []
        while self.head() is not None:
            waiting.append(self.pop())
        names = list(replicas)
        for i, sample in enumerate(waiting):
            yield sample, names[i * len(names) // len(waiting)]

    def route(
        self, replicas: Replicas, *, together: bool, home: Callable[[LiveSample], int | None]
    ) -> Iterator[tuple[LiveSample, int]]:
        """Waiting samples with the replica that carries least, or `home` where that has room; `together`: siblings
        follow as far as the room goes. The caller occupies the replica before it asks for the next."""
        while (head := self.head()) is not None:
            name = replicas.lightest()
            if name is None:
                return
            preferred = home(head)
            if preferred is not None and preferred in replicas and replicas[preferred].room > 0:
                name = preferred
            for _ in range(replicas[name].room if together else 1):
                yield self.pop(), name
                following = self.head()
                if following is None or following.group is not head.group:
                    break
