"""What a rank is doing right now, readable by its node agent even when the rank is stuck or dead.

Each rank maps a small file. Its main thread notes the command it executes, a daemon thread beats once a second.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from pathlib import Path
from typing import NamedTuple

_LAYOUT = struct.Struct("=ddq64s")  # beat, since, seq, activity
_BEAT, _SINCE, _SEQ, _ACTIVITY = 0, 1, 2, slice(24, 88)  # the numbers in units of eight bytes
BEAT_EVERY_S = 1.0
LEAVING = "leave"
"""The activity of a rank that may end: any other one at the end of a process means that it was not done."""


class Activity(NamedTuple):
    """What a trace file says: seconds since the last beat and since the activity began, its number and name."""

    beat_age_s: float
    age_s: float
    seq: int
    name: str


class Trace:
    """The writing side; one per rank process."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.doing = "start"
        now = time.monotonic()  # one clock for all processes of a host, and none that somebody sets
        path.write_bytes(_LAYOUT.pack(now, now, 0, self.doing.encode()))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
        # A number is written in one store. struct.pack_into clears the place first, and an agent that looks just then
        # would end a rank that has been silent since the host's boot.
        self._floats, self._ints = memoryview(self._map).cast("d"), memoryview(self._map).cast("q")
        threading.Thread(target=self._beat_forever, name="heartbeat", daemon=True).start()

    def enter(self, activity: str, seq: int = 0) -> None:
        """Note what the main thread does from now on."""
        self.doing = f"{activity} #{seq}" if seq else activity
        self._floats[_SINCE], self._ints[_SEQ] = time.monotonic(), seq
        self._map[_ACTIVITY] = activity.encode()[:64].ljust(64, b"\0")

    def go_on(self) -> None:
        """Note that the main thread is not stuck in what it does, which takes long."""
        self._floats[_SINCE] = time.monotonic()

    def _beat(self) -> None:
        self._floats[_BEAT] = time.monotonic()

    def _beat_forever(self) -> None:
        while True:
            time.sleep(BEAT_EVERY_S)
            self._beat()


def read_trace(path: Path) -> Activity | None:
    """The reading side; None when the rank has not written one yet."""
    if not path.exists():
        return None
    raw = path.read_bytes()
    if len(raw) != _LAYOUT.size:
        return None
    beat, since, seq, name = _LAYOUT.unpack(raw)
    now = time.monotonic()
    return Activity(now - beat, now - since, seq, name.rstrip(b"\0").decode(errors="replace"))
