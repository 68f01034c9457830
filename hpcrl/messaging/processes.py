"""What the kernel says of a rank's process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

STATE, BORN = 0, 19  # places in /proc/PID/stat after the name, which may have any bytes


def born(pid: int) -> str:
    """When a process began, in ticks since the start of its host; empty if it has ended. With its number it names a
    process."""
    return _stat(pid)[BORN]


def state(pid: int, began: str = "") -> Literal["gone", "stopped", "runs"]:
    """Of a process that began then, if that is given. gone: it has ended. stopped: by a signal; a debugger's stop is
    another state."""
    words = _stat(pid)
    if words[STATE] in "ZX" or (began and words[BORN] != began):
        return "gone"
    return "stopped" if words[STATE] == "T" else "runs"


def rank_name(rank: int) -> str:
    """The name of a rank's process in ps and top. Slurm's proctrack/linuxproc takes what follows a blank for something
    else."""
    return f"hpcrl-rank-{rank}"


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return [""] * (BORN + 1)
