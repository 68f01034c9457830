"""What the kernel says of a rank's process."""

from __future__ import annotations

from pathlib import Path


def is_stopped(pid: int, name: str = "") -> bool:
    """Whether a signal has stopped a process, and it has this name if one is given. A debugger's stop is another
    state."""
    try:
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:  # it has ended
        return False
    return after.split()[0] == "T" and before.partition("(")[2].startswith(name)


def rank_name(rank: int) -> str:
    """The name of a rank's process in ps and top. Slurm's proctrack/linuxproc takes what follows a blank for something
    else."""
    return f"hpcrl-rank-{rank}"
