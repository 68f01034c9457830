"""A cache whose values have a limited total size."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

V = TypeVar("V")


class SizedCache(Generic[V]):
    """The most recently used values. Threads may share it.

    Args:
        max_bytes: Maximum total size; a single larger value is kept as well.
        num_bytes: The function that returns a value's size.
    """

    def __init__(self, max_bytes: int, num_bytes: Callable[[V], int]):
        self._max_bytes, self._num_bytes = max_bytes, num_bytes
        self._values: dict[bytes, V] = {}  # the least recently used first
        self._total = 0
        self._lock = threading.Lock()

    def get(self, key: bytes, make: Callable[[], V]) -> V:
        """The value of a key, made if absent. Errors of `make` are raised, and nothing is kept."""
        with self._lock:
            if key in self._values:
                found = self._values[key] = self._values.pop(key)
                return found
        made = make()
        with self._lock:
            if key not in self._values:  # another thread may have made it
                self._values[key] = made
                self._total += self._num_bytes(made)
            while self._total > self._max_bytes and len(self._values) > 1:
                self._total -= self._num_bytes(self._values.pop(next(iter(self._values))))
        return made
