"""A rank's current activity, readable by its node agent even if the rank is stuck or dead.

Each rank maps a memory page (hpcrl.system.stacks) that its agent has created. The main thread records the command it
executes; a daemon thread records a heartbeat once a second. No file system is involved, so a stalled one does not stop
the heartbeat.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

_LAYOUT = struct.Struct("=ddq64s64s")  # beat, since, seq, activity, thread activity
_BEAT, _SINCE, _SEQ, _ACTIVITY, _THREAD_ACTIVITY = (
    0,
    1,
    2,
    slice(24, 88),
    slice(88, 152),
)  # numbers in units of eight bytes
BEAT_EVERY_S = 1.0
DESCRIPTOR = "HPCRL_TRACE"
"""Environment variable of a rank: its page's file descriptor."""
LEAVING = "leave"
"""The activity of a rank that may exit; a process that ends in any other activity has unfinished work."""


class Activity(NamedTuple):
    """Times of a rank's last heartbeat and of its activity's start, on the host's monotonic clock, and the activity's
    number and name. `thread_activity` is the configuration section whose code another thread executes, or empty."""

    beat: float
    since: float
    seq: int
    name: str
    thread_activity: str = ""


class UnansweredCommand(NamedTuple):
    """What rank 0 knows about a rank: the oldest command that it has not answered, its number, and since when."""

    rank: int
    command: str
    seq: int
    seconds: float


class Trace:
    """The writing side; one per rank process. `descriptor` is its page; None: a page that nobody else reads."""

    def __init__(self, descriptor: int | None = None):
        self.doing = "start"
        self._map = mmap.mmap(-1 if descriptor is None else descriptor, _LAYOUT.size)
        # Each number is written in one memory store. struct.pack_into clears the bytes first, and an agent that reads
        # the cleared bytes would end the rank as silent since the host's boot.
        self._floats, self._ints = memoryview(self._map).cast("d"), memoryview(self._map).cast("q")
        self.enter(self.doing)
        self._beat()
        threading.Thread(target=self._beat_forever, name="heartbeat", daemon=True).start()

    @classmethod
    def of_process(cls, environ: Mapping[str, str] = os.environ) -> Trace:
        """The trace of this rank, on the page that DESCRIPTOR names."""
        descriptor = environ.get(DESCRIPTOR)
        return cls(int(descriptor) if descriptor is not None else None)

    def enter(self, activity: str, seq: int = 0) -> None:
        """Record the main thread's new activity."""
        self.doing = f"{activity} #{seq}" if seq else activity
        self._floats[_SINCE], self._ints[_SEQ] = time.monotonic(), seq
        self._map[_ACTIVITY] = activity.encode()[:64].ljust(64, b"\0")

    def set_thread_activity(self, section: str) -> None:
        """Record the configuration section whose code another thread executes from now on; empty: none does."""
        self._map[_THREAD_ACTIVITY] = section.encode()[:64].ljust(64, b"\0")

    def report_progress(self) -> None:
        """Record progress of the main thread in a long activity."""
        self._floats[_SINCE] = time.monotonic()

    def read(self) -> Activity | None:
        """The record as the agent reads it."""
        return _unpack(self._map[:])

    def _beat(self) -> None:
        self._floats[_BEAT] = time.monotonic()

    def _beat_forever(self) -> None:
        while True:
            time.sleep(BEAT_EVERY_S)
            self._beat()


def read_trace(descriptor: int) -> Activity | None:
    """The reading side; None before the rank's first record."""
    return _unpack(os.pread(descriptor, _LAYOUT.size, 0))


def _unpack(raw: bytes) -> Activity | None:
    beat, since, seq, *texts = _LAYOUT.unpack(raw)
    return (
        Activity(beat, since, seq, *(text.rstrip(b"\0").decode(errors="replace") for text in texts)) if beat else None
    )
