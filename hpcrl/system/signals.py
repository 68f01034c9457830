"""Signals that ask a run to stop. A batch system sends them to every process of a step, but only the node agents and
rank 0 handle them: other processes continue, so a save is still possible."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def noted() -> Iterator[list[int]]:
    """Record the signals received inside, in order, without other effect; received signals are ignored afterwards,
    since the run has ended. Called on the main thread."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in STOPPING}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if number in came else handler)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Block stop signals inside; they take effect at the end. Processes started inside get none before they call
    ignore_signals or let_signals_pass."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Make this process and all processes that it starts ignore the stop signals."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def let_signals_pass() -> None:
    """Make this process ignore the stop signals; programs that it starts can be ended by them."""
    for number in STOPPING:
        signal.signal(number, _nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def die_with(parent: int) -> None:
    """Make the kernel kill this process when the thread of `parent` that started it ends; exit at once if that thread
    has already ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def stop_with(parent: int) -> None:
    """As die_with(), but the kernel sends SIGTERM, after which a run saves and stops."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """On Linux, make orphaned descendants children of this process instead of init's."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _nothing(number: int, frame: object) -> None:
    pass
