"""How much more may be written into a folder: free space and inodes of its file system, and quotas."""

from __future__ import annotations

import grp
import math
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ASK_EVERY_S = 60.0
QUOTA_S = 5.0  # timeout of a command; one that is silent is not asked again
BLOCK_BYTES = 1024  # the unit of quota and lfs quota
MOUNTS = Path("/proc/self/mountinfo")
LUSTRE = "lustre"


class Allowance(NamedTuple):
    """How much a limit leaves; inf if it does not limit bytes or files. `limit` names it in messages."""

    limit: str
    num_bytes: float
    num_files: float


class Mount(NamedTuple):
    """A mounted file system; `source` is a device or server:/export."""

    kind: str
    source: str
    folder: str


def free_space(folder: Path) -> Allowance:
    """What the file system of an existing folder has free for a user. XFS and ext4 also count a project's quota here.
    OSError if it cannot be queried."""
    found = os.statvfs(folder)
    num_files = found.f_favail if found.f_files else math.inf  # Btrfs and others have no fixed number of inodes
    return Allowance("the file system", found.f_bavail * found.f_frsize, num_files)


class Quotas:
    """The quotas of this process's user and group, and on Lustre of the folder's project, as far as the commands quota
    and lfs report them; other limits are unknown."""

    def __init__(self, folder: Path, mounts: Path = MOUNTS):
        """`folder` must exist when it is asked for."""
        self._folder, self._mounts = folder, mounts
        self._asked: float | None = None
        self._left: list[Allowance] = []
        self._silent: set[str] = set()

    def left(self) -> list[Allowance]:
        """What the quotas leave, asked for at most every ASK_EVERY_S; empty if none is known."""
        if self._asked is None or time.monotonic() - self._asked > ASK_EVERY_S:
            try:
                self._left = list(self._ask())
            except OSError:
                self._left = []
            self._asked = time.monotonic()
        return self._left

    def forget(self) -> None:
        """Ask again at the next call of left()."""
        self._asked = None

    def _ask(self) -> Iterator[Allowance]:
        mount = mount_of(self._folder, self._mounts)
        if mount is None:
            return
        found = self._folder.stat()
        user, group = os.getuid(), found.st_gid if found.st_mode & stat.S_ISGID else os.getegid()
        if mount.kind == LUSTRE:
            whose = [("user", "-u", str(user)), ("group", "-g", str(group))]
            project = self._call("lfs", "project", "-d", str(self._folder)).split()[:1]
            whose += [("project", "-p", number) for number in project if number.isdigit() and int(number)]
            for kind, option, number in whose:
                rows = quota_rows(self._call("lfs", "quota", "-q", option, number, mount.folder))
                yield from (_allowance(f"the quota of {kind} {number}", row) for row in list(rows.values())[:1])
            return
        for kind, own, more in (("user", user, []), ("group", group, [_group_name(group)])):
            rows = quota_rows(self._call("quota", "-w", "-p", f"-{kind[0]}", *more))
            if mount.source in rows:
                yield _allowance(f"the quota of {kind} {own}", rows[mount.source])

    def _call(self, *command: str) -> str:
        """What a command prints, whatever its exit code, which `quota` uses to report a quota that is exceeded; empty
        if it is not installed or gives no answer in time."""
        if command[0] in self._silent or shutil.which(command[0]) is None:
            return ""
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=QUOTA_S,
                check=False,
                env={**os.environ, "LC_ALL": "C"},
            )
        except (OSError, subprocess.TimeoutExpired):
            self._silent.add(command[0])
            return ""
        return done.stdout


def mount_of(folder: Path, mounts: Path = MOUNTS) -> Mount | None:
    """The file system that holds a folder; None if unknown. OSError if `mounts` cannot be read."""
    real, best = os.path.realpath(folder), None
    for line in mounts.read_text(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        place, kind = before.split(), after.split()
        if len(place) < 5 or len(kind) < 2:
            continue
        at = _unescaped(place[4])
        holds = real == at or real.startswith(at.rstrip("/") + "/")
        if holds and (best is None or len(at) >= len(best.folder)):  # of two mounts at one place the later one is seen
            best = Mount(kind[0], _unescaped(kind[1]), at)
    return best


Numbers = tuple[int, int, int, str]
"""Used, soft limit, hard limit (0: none), grace."""

_NUMBER = r"\[?(\d+)\]?\*?"  # lfs puts inexact numbers in brackets; a star follows those that exceed their limit
_COLUMNS = rf"{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}(?:\s+(\S+))?"
_ROW = re.compile(rf"\s*(?:(?!{_NUMBER}\s)(\S.*?)\s+)?{_COLUMNS}\s+{_COLUMNS}\s*", re.ASCII)


def quota_rows(text: str) -> dict[str, tuple[Numbers, Numbers]]:
    """File system -> blocks and files, from the output of `quota` or `lfs quota`, in which a long name may have a line
    of its own, and a grace may be left blank. Other lines are ignored."""
    rows: dict[str, tuple[Numbers, Numbers]] = {}
    above = ""
    for line in text.splitlines():
        if len(words := line.split()) == 1:
            above = words[0]
        elif match := _ROW.fullmatch(line):
            _, name, *columns = match.groups()
            if name or above:
                rows[name or above] = _numbers(columns[:4]), _numbers(columns[4:])
            above = ""
    return rows


def _numbers(columns: Sequence[str | None]) -> Numbers:
    used, soft, hard, grace = (column or "" for column in columns)
    return int(used), int(soft), int(hard), grace


def _allowance(limit: str, row: tuple[Numbers, Numbers]) -> Allowance:
    return Allowance(limit, _left(row[0]) * BLOCK_BYTES, _left(row[1]))


def _left(numbers: Numbers) -> float:
    used, soft, hard, grace = numbers
    expired = grace in ("none", "expired") or (grace.isdigit() and 0 < int(grace) < time.time())
    if soft and used > soft and expired:
        return 0
    return max(hard - used, 0) if hard else math.inf


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _unescaped(text: str) -> str:
    """The kernel writes blanks and backslashes in octal."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text
