"""The memory available to a run on this machine, and whether the kernel has killed a process for lack of memory.

Linux limits memory by cgroups, of version 2 (memory.max) or 1 (memory.limit_in_bytes); Slurm and containers set them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcrl.node.numa import gpu_memory_bytes


def memory_limit(root: Path = Path("/")) -> tuple[int, str]:
    """Maximum bytes for this process and its children, and the source of this limit as text; (0, "") if unknown.
    `root` is the folder that contains /proc and /sys."""
    limits = [(num_bytes, f"its cgroup's limit in {file}") for file, num_bytes in _cgroup_limits(root)]
    with contextlib.suppress(OSError):
        total = re.search(r"^MemTotal:\s+(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
        if total:
            limits.append((int(total[1]) * 1024 - gpu_memory_bytes(root), "the machine's memory"))
    return min(limits, default=(0, ""))


def _cgroup_limits(root: Path) -> Iterator[tuple[str, int]]:
    for top, own, name in _cgroups(root):
        for folder in (own, *own.parents):
            if folder.is_relative_to(top):
                with contextlib.suppress(OSError, ValueError):  # "max": none
                    yield f"/{(folder / name).relative_to(root)}", int((folder / name).read_text())


LIMIT_FILES = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""Controllers in /proc/self/cgroup (version 2 has none there) -> the file with the limit."""


def _cgroups(root: Path) -> Iterator[tuple[Path, Path, str]]:
    """This process's memory cgroups: (folder of all cgroups, its own folder, name of the file with its limit)."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in LIMIT_FILES:
                top = root / "sys/fs/cgroup" / controllers
                yield top, top / path.lstrip("/"), LIMIT_FILES[controllers]


@dataclass(frozen=True)
class OutOfMemoryKills:
    """Processes killed for lack of memory so far: in this process's cgroup, and on the machine."""

    in_cgroup: int = 0
    on_machine: int = 0

    @classmethod
    def now(cls, root: Path = Path("/")) -> OutOfMemoryKills:
        """The kernel's counts; 0 where it has none."""
        files = [own / name for _, own, _ in _cgroups(root) for name in ("memory.events", "memory.oom_control")]
        return cls(max(map(_count, files), default=0), _count(root / "proc/vmstat"))

    def explain(self, earlier: OutOfMemoryKills) -> str:
        """Why a process may have been killed since `earlier`, in brackets; empty if not for memory."""
        if self.in_cgroup > earlier.in_cgroup:
            return " (by the kernel, for lack of memory: the limit of its cgroup was reached)"
        if self.on_machine > earlier.on_machine:
            return " (perhaps by the kernel, which killed a process of this machine for lack of memory)"
        return ""


def _count(file: Path) -> int:
    with contextlib.suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0
