"""Processes that a test has started through hpcrl."""

from __future__ import annotations

import psutil


def children(module: str) -> list[psutil.Process]:
    """Children of this process that run `python -m module`, in the order of their start."""
    found = []
    for process in psutil.Process().children():
        try:
            if module in process.cmdline():
                found.append(process)
        except psutil.Error:  # has ended, and nobody has waited for it yet
            continue
    return found


def runs(pid: int) -> bool:
    """Whether a process runs; one that has ended may be waited for at any moment."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
