"""The end of a process that hangs, and of all that it has started: each Python process first writes its stacks."""

from __future__ import annotations

import contextlib
import os
import signal
from subprocess import Popen
from typing import Any

import psutil

STACKS = {"PYTHONFAULTHANDLER": "1"}
"""In the environment of a process: it and its children write the stacks of all threads to stderr at SIGABRT."""
WRITING_S = 5.0


def end_all(child: Popen[Any]) -> None:
    """End what is left of a child with a session of its own. If it still runs, it and all its descendants, also those
    in other sessions, get SIGABRT, and SIGKILL after WRITING_S."""
    if child.poll() is None:
        first = psutil.Process(child.pid)
        processes = [*reversed(first.children(recursive=True)), first]  # before those that wait for them
        for number, patience_s in ((signal.SIGABRT, WRITING_S), (signal.SIGKILL, 0)):
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            _, processes = psutil.wait_procs(processes, timeout=patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
