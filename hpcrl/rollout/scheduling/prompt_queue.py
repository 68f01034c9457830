"""Prompts that wait for their start."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Start(NamedTuple):
    """A prompt to start. `failures`: attempts that ended with an error; `home`: the replica that has its prefix."""

    uid: int
    attempt: int = 0
    failures: int = 0
    home: int | None = None


class PromptQueue:
    """Ordered by uid, so that a restarted prompt precedes all newer prompts."""

    def __init__(self) -> None:
        self.newest_uid = -1
        self._heap: list[Start] = []  # uids differ

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, uids: Iterable[int]) -> None:
        """Add fresh prompts; uids rise over all calls."""
        for uid in uids:
            if uid <= self.newest_uid:
                raise ValueError(f"prompt {uid} comes after prompt {self.newest_uid}; uids must rise")
            self.newest_uid = uid
            heapq.heappush(self._heap, Start(uid))

    def put_back(self, start: Start) -> None:
        heapq.heappush(self._heap, start)

    def pop(self) -> Start:
        """The oldest prompt."""
        return heapq.heappop(self._heap)

    def saved(self) -> list[list[int]]:
        """[uid, attempt, failures] of all, JSON-able."""
        return [[start.uid, start.attempt, start.failures] for start in self._heap]

    def restore(self, newest_uid: int, saved: Iterable[Sequence[int]]) -> None:
        assert self.newest_uid == -1, "restore is for a new queue"
        self.newest_uid = newest_uid
        for uid, attempt, failures in saved:
            self.put_back(Start(uid, attempt, failures))
