"""Prompts that wait to be started."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


class PromptQueue:
    """Uids in rising order, so that a prompt that starts anew comes before all that are younger."""

    def __init__(self) -> None:
        self.newest_uid = -1
        self._heap: list[int] = []
        self._tries: dict[int, tuple[int, int]] = {}  # uid -> (next attempt, failures) of those that start anew

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, uids: Iterable[int]) -> None:
        """Add fresh prompts; uids rise over all calls."""
        for uid in uids:
            if uid <= self.newest_uid:
                raise ValueError(f"prompt {uid} comes after prompt {self.newest_uid}; uids must rise")
            self.newest_uid = uid
            heapq.heappush(self._heap, uid)

    def put_back(self, uid: int, attempt: int, failures: int) -> None:
        """A prompt starts anew with this attempt."""
        self._tries[uid] = (attempt, failures)
        heapq.heappush(self._heap, uid)

    def pop(self) -> tuple[int, int, int]:
        """The oldest prompt: (uid, attempt, failures)."""
        uid = heapq.heappop(self._heap)
        return (uid, *self._tries.pop(uid, (0, 0)))

    def saved(self) -> list[list[int]]:
        """[uid, attempt, failures] of all, JSON-able."""
        return [[uid, *self._tries.get(uid, (0, 0))] for uid in self._heap]

    def restore(self, newest_uid: int, saved: Iterable[Sequence[int]]) -> None:
        """Fill a new queue."""
        assert self.newest_uid == -1, "restore is for a new queue"
        self.newest_uid = newest_uid
        for uid, attempt, failures in saved:
            self.put_back(uid, attempt, failures)
