"""What a rank is doing right now, readable by its node agent even when the rank is stuck or dead.

Each rank maps a page of memory that its agent has made. Its main thread notes the command it executes, a daemon thread
beats once a second. No file system is asked: while one stalls, a rank that waits for nothing goes on beating.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

_LAYOUT = struct.Struct("=ddq64s")  # beat, since, seq, activity
_BEAT, _SINCE, _SEQ, _ACTIVITY = 0, 1, 2, slice(24, 88)  # the numbers in units of eight bytes
BEAT_EVERY_S = 1.0
DESCRIPTOR = "HPCRL_TRACE"
"""Environment variable of a rank that has an agent: the open file that holds the page."""
LEAVING = "leave"
"""The activity of a rank that may end: any other one at the end of a process means that it was not done."""


class Activity(NamedTuple):
    """What a rank has noted: when it last beat and when its activity began, on the host's monotonic clock; the
    activity's number and name."""

    beat: float
    since: float
    seq: int
    name: str


def new_page() -> int:
    """Open file of an empty page, to be inherited by the rank that writes to it."""
    descriptor = os.memfd_create("hpcrl trace")
    os.truncate(descriptor, _LAYOUT.size)
    return descriptor


class Trace:
    """The writing side; one per rank process. descriptor: of the agent's page; None where no agent watches the rank."""

    def __init__(self, descriptor: int | None = None):
        self.doing = "start"
        self._map = mmap.mmap(-1 if descriptor is None else descriptor, _LAYOUT.size)
        # A number is written in one store. struct.pack_into clears the place first, and an agent that looks just then
        # would end a rank that has been silent since the host's boot.
        self._floats, self._ints = memoryview(self._map).cast("d"), memoryview(self._map).cast("q")
        self.enter(self.doing)
        self._beat()
        threading.Thread(target=self._beat_forever, name="heartbeat", daemon=True).start()

    @classmethod
    def of_process(cls, environ: Mapping[str, str] = os.environ) -> Trace:
        """The trace of this rank, which its agent reads if it has one."""
        descriptor = environ.get(DESCRIPTOR)
        return cls(int(descriptor) if descriptor is not None else None)

    def enter(self, activity: str, seq: int = 0) -> None:
        """Note what the main thread does from now on."""
        self.doing = f"{activity} #{seq}" if seq else activity
        self._floats[_SINCE], self._ints[_SEQ] = time.monotonic(), seq
        self._map[_ACTIVITY] = activity.encode()[:64].ljust(64, b"\0")

    def go_on(self) -> None:
        """Note that the main thread is not stuck in what it does, which takes long."""
        self._floats[_SINCE] = time.monotonic()

    def read(self) -> Activity | None:
        """As the agent reads it."""
        return _unpack(self._map[:])

    def _beat(self) -> None:
        self._floats[_BEAT] = time.monotonic()

    def _beat_forever(self) -> None:
        while True:
            time.sleep(BEAT_EVERY_S)
            self._beat()


def read_trace(descriptor: int) -> Activity | None:
    """The reading side; None while the rank has not come up."""
    return _unpack(os.pread(descriptor, _LAYOUT.size, 0))


def _unpack(raw: bytes) -> Activity | None:
    beat, since, seq, name = _LAYOUT.unpack(raw)
    return Activity(beat, since, seq, name.rstrip(b"\0").decode(errors="replace")) if beat else None
