"""The end of a process that hangs, and of all that it has started: each Python process first writes its stacks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from subprocess import Popen
from typing import Any

import psutil

STACKS = {"PYTHONFAULTHANDLER": "1"}
"""In the environment of a process: it and its children write the stacks of all threads to stderr at SIGABRT."""
WRITING_S = 5.0


def end_all(child: Popen[Any]) -> None:
    """End what is left of a child with a session of its own. If it still runs, it and all its descendants, also those
    in other sessions, get SIGABRT, and SIGKILL after WRITING_S.

    The processes may share a file, where stacks written at once would mix: each gets SIGABRT while the others are
    stopped, and cannot react to its end.
    """
    if child.poll() is None:
        first = psutil.Process(child.pid)
        processes = [*reversed(first.children(recursive=True)), first]
        _send(signal.SIGSTOP, *processes)
        deadline = time.monotonic() + WRITING_S
        for process in processes:
            _send(signal.SIGABRT, process)
            _send(signal.SIGCONT, process)
            while _runs(process) and time.monotonic() < deadline:
                time.sleep(0.01)
        _send(signal.SIGKILL, *processes)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _send(number: signal.Signals, *processes: psutil.Process) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False
