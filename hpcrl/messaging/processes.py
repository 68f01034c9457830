"""A rank's process, as the kernel reports it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

STATE, BORN = 0, 19  # fields of /proc/PID/stat after the name, which may contain any bytes
RANK_NAME = re.compile(r"hpcrl-rank-(\d+)")
"""What rank_name() gives."""


def born(pid: int) -> str:
    """A process's start time in ticks since boot, which with its id identifies it; empty if it has ended."""
    return _stat(pid)[BORN]


def state(pid: int, began: str = "") -> Literal["gone", "stopped", "runs"]:
    """A process's state: "gone" if it has ended or did not start at `began`, "stopped" if a signal has stopped it. A
    process that a debugger stopped counts as running."""
    words = _stat(pid)
    if words[STATE] in "ZX" or (began and words[BORN] != began):
        return "gone"
    return "stopped" if words[STATE] == "T" else "runs"


def rank_name(rank: int) -> str:
    """The name of a rank's process in ps and top, without blanks, which Slurm's proctrack/linuxproc misreads."""
    return f"hpcrl-rank-{rank}"


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return [""] * (BORN + 1)
