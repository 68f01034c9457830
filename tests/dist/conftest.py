"""A world of three or more ranks as threads of the test: real stores, queues and gloo groups with one import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

SIZE = 3


class Threads:
    """The ranks' worlds, and a method that runs an action on all ranks at once."""

    def __init__(self, folder: Path, size: int = SIZE):
        from hpcrl.messaging.bootstrap import ProcessInfo
        from hpcrl.messaging.world import join

        self._size, self._pool = size, ThreadPoolExecutor(size)
        self.worlds = self.every(
            lambda rank: join(
                ProcessInfo("rank", "agent", rank, 0, 1), size, folder, start_s=30.0, store_s=30.0, command_s=20.0
            )
        )

    def every(self, action: Callable[[int], Any]) -> list[Any]:
        """action(rank) on every rank's thread; their results in order."""
        return list(self._pool.map(action, range(self._size)))

    def close(self) -> None:
        for world in self.worlds:
            world.leave()
        self._pool.shutdown()


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Threads]:
    threads = Threads(tmp_path_factory.mktemp("world"))
    yield threads
    threads.close()
