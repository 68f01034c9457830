"""A generator replica in virtual time: slots, a queue, and decode iterations that take longer the more are live.

All live requests get one token per iteration, so one clock that counts iterations serves them all: a request that
starts at c with n tokens ends at c + n, however often the pace changes meanwhile. Nothing is done token by token.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from tests.bench.flash.settings import World


@dataclass(frozen=True, slots=True)
class Request:
    """A sample and the tokens of its answer."""

    sample_id: int
    tokens: int


class Engine:
    """One replica. Ask `next_time()` for its next event and bring it there with `advance()`."""

    def __init__(self, world: World, name: int):
        self._world, self._slowness = world, dict(world.slowness).get(name, 1.0)
        self.time, self.executed = 0.0, 0.0  # seconds; tokens generated so far
        self._count = 0.0  # iterations so far
        self._paused = False
        self._queue: deque[Request] = deque()
        self._live: dict[int, tuple[float, float]] = {}  # sample -> iterations when it started and when it will end
        self._ends: list[tuple[float, int]] = []  # heap of the ends; those of dropped samples are skipped
        self._unreported: list[int] = []
        self._report_at = math.inf  # iterations

    @property
    def num_requests(self) -> int:
        return len(self._live) + len(self._queue)

    def add(self, requests: list[Request]) -> None:
        """Queue requests at the present time."""
        self._queue.extend(requests)
        self._fill()

    def drop(self, sample_ids: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Stop samples; (sample, tokens generated) of those that were queued or live."""
        dropped = []
        for sample_id in sample_ids:
            if sample_id in self._live:
                dropped.append((sample_id, int(self._count - self._live.pop(sample_id)[0])))
        if len(dropped) < len(sample_ids) and self._queue:
            gone = set(sample_ids)
            dropped += [(request.sample_id, 0) for request in self._queue if request.sample_id in gone]
            self._queue = deque(request for request in self._queue if request.sample_id not in gone)
        self._fill()
        return tuple(dropped)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._fill()

    def next_time(self) -> float:
        """When a request ends or ends are reported next; infinite if nothing will happen."""
        if self._unreported and not self._live:
            return self.time
        if self._paused or not self._live:
            return math.inf
        return self.time + (self._next_count() - self._count) * self._pace()

    def advance(self, now: float) -> None:
        """Generate until `now`, which is not after next_time(). Ended requests leave room for queued ones."""
        if self._live and not self._paused:
            target = self._next_count()
            reached = min(target, self._count + (now - self.time) / self._pace())
            if target - reached < 1e-6:
                reached = target  # the next event, but for rounding
            self.executed += len(self._live) * (reached - self._count)
            self._count = reached
        self.time = now
        while self._ends and self._ends[0][0] <= self._count:
            end, sample_id = heapq.heappop(self._ends)
            if self._live.get(sample_id, (0, -1))[1] == end:
                del self._live[sample_id]
                self._unreported.append(sample_id)
                burst = self._world.decode_chunk_tokens
                self._report_at = min(self._report_at, math.ceil(self._count / burst) * burst)
        self._fill()

    def reported(self) -> list[int]:
        """Samples whose end is reported now, at the end of a burst."""
        if not self._unreported or (self._live and self._count < self._report_at):
            return []
        ended, self._unreported, self._report_at = self._unreported, [], math.inf
        return ended

    def _next_count(self) -> float:
        while self._live.get(self._ends[0][1], (0, -1))[1] != self._ends[0][0]:
            heapq.heappop(self._ends)
        return min(self._ends[0][0], self._report_at)

    def _pace(self) -> float:
        return self._world.iteration_s(len(self._live)) * self._slowness

    def _fill(self) -> None:
        while self._queue and len(self._live) < self._world.slots and not self._paused:
            request = self._queue.popleft()
            end = self._count + request.tokens
            self._live[request.sample_id] = (self._count, end)
            heapq.heappush(self._ends, (end, request.sample_id))
