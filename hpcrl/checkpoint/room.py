"""Whether the next checkpoint fits into the file system and the quotas, and what is deleted to make room for it."""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from hpcrl.checkpoint.commit import LEFTOVER, PRUNED, remove_checkpoint
from hpcrl.system.files import remove, step_name, steps_in
from hpcrl.system.quotas import Allowance, Quotas, free_space

logger = logging.getLogger(__name__)

WAY_OUT = "remove files or ask for more"
DISK_BLOCK_BYTES = 512
"""The unit of st_blocks."""


class NoRoomError(OSError):
    """A checkpoint was not begun because it does not fit."""


class Size(NamedTuple):
    """What a checkpoint occupies; `num_files` are inodes, folders included."""

    num_bytes: int
    num_files: int


def size_on_disk(folder: Path) -> Size:
    """What a folder and its content occupy; links are not followed. OSError if it cannot be read."""

    def refuse(error: OSError) -> None:
        raise error

    found = [folder.stat().st_blocks]
    for at, folders, files in os.walk(folder, onerror=refuse):
        found += [os.lstat(os.path.join(at, name)).st_blocks for name in (*folders, *files)]
    return Size(sum(found) * DISK_BLOCK_BYTES, len(found))


class Room:
    """The room for a run's checkpoints. `need` is what the next one is expected to occupy, None if unknown."""

    def __init__(self, root: Path, attempt: int, prune: bool, quotas: Quotas | None = None):
        """`root` is the folder of the checkpoints, in a folder that exists; with `prune`, make() may delete some."""
        self._root, self._attempt, self._prune = root, attempt, prune
        self._quotas = quotas or Quotas(root.parent)
        self._told = self._is_measured = False
        self.need: Size | None = None

    def measure(self, step: int) -> None:
        """Expect the next checkpoint to be as large as the one of this step."""
        self.need, self._is_measured = size_on_disk(self._root / step_name(step)), True

    def foresee(self, kept: Callable[[], Collection[int]]) -> None:
        """Warn, once until it fits again, if the next checkpoint does not fit even if make() deletes all but those that
        are `kept`."""
        lacking = self._lacking()
        removable = self._removable(kept()) if lacking else []
        self._warn([] if self._prune and _covers(removable, lacking) else lacking, removable)

    def make(self, kept: Callable[[], Collection[int]], was_refused: bool = False, anyway: bool = False) -> None:
        """Delete what killed attempts have left and then, oldest first, as many checkpoints as the next one needs, but
        none if all that are not `kept` would not suffice. After a save that `was_refused` for lack of room that nothing
        shows, delete the oldest one. Called by rank 0 while nothing is written.

        NoRoomError, unless `anyway`, if the next one still does not fit, by the size of the last one: to try would fill
        the file system for all who write there. OSError if something cannot be deleted.
        """
        lacking = self._lacking()
        if (lacking or was_refused) and self._remove_leftovers():
            lacking = self._lacking()
        removable = self._removable(kept()) if lacking or was_refused else []
        if self._prune and was_refused and not lacking:
            for step, _ in removable[:1]:
                self._remove(step, "the last save was refused for lack of room")
        elif self._prune and lacking and _covers(removable, lacking):
            why = self._text(lacking)
            while lacking:
                step, size = removable.pop(0)
                self._remove(step, why)
                lacking = _after(lacking, size)
            self._quotas.forget()
        self._warn(lacking, removable)
        if lacking and self._is_measured and not anyway:
            refused = NoRoomError(f"{self._text(lacking)}; {WAY_OUT}")
            refused.errno = errno.ENOSPC
            raise refused

    def _lacking(self) -> list[tuple[Allowance, Size]]:
        """The limits that are too small, and by how much."""
        if self.need is None:
            return []
        folder = self._root if self._root.is_dir() else self._root.parent
        missing = []
        for allowance in (free_space(folder), *self._quotas.left()):
            num_bytes, num_files = self.need.num_bytes - allowance.num_bytes, self.need.num_files - allowance.num_files
            if num_bytes > 0 or num_files > 0:
                missing.append((allowance, Size(math.ceil(max(num_bytes, 0)), math.ceil(max(num_files, 0)))))
        return missing

    def _removable(self, keep: Collection[int]) -> list[tuple[int, Size]]:
        """Checkpoints that may be deleted, oldest first. A link to another place frees nothing, so it stays."""
        paths = ((step, self._root / step_name(step)) for step in steps_in(self._root) if step not in keep)
        return [(step, size_on_disk(path)) for step, path in paths if not path.is_symlink()] if keep else []

    def _remove(self, step: int, why: str) -> None:
        remove_checkpoint(self._root, step)
        logger.warning("checkpoint of step %d deleted to make room (prune_when_full): %s", step, why)

    def _remove_leftovers(self) -> bool:
        """Remove unfinished saves of this attempt and earlier ones, and checkpoints that were being deleted."""
        found = False
        for entry in list(self._root.iterdir()) if self._root.is_dir() else []:
            writer = entry.name.partition(".tmp-")[2]
            old = writer == PRUNED or (writer.isdigit() and int(writer) <= self._attempt)
            if old and LEFTOVER.fullmatch(entry.name):
                remove(entry)
                found = True
        return found

    def _warn(self, lacking: list[tuple[Allowance, Size]], removable: list[tuple[int, Size]]) -> None:
        if lacking and not self._told:
            more = ", or set prune_when_full=true, which deletes the oldest checkpoints"
            way_out = more if not self._prune and _covers(removable, lacking) else ""
            logger.warning("%s; %s%s", self._text(lacking), WAY_OUT, way_out)
        self._told = bool(lacking)

    def _text(self, lacking: list[tuple[Allowance, Size]]) -> str:
        assert self.need is not None
        left = "; ".join(f"{a.limit} leaves {_bytes(a.num_bytes)}{_files(a.num_files)}" for a, _ in lacking)
        return (
            f"the next checkpoint needs about {_bytes(self.need.num_bytes)}{_files(self.need.num_files)} in "
            f"{self._root}, but {left}"
        )


def _covers(removable: list[tuple[int, Size]], lacking: list[tuple[Allowance, Size]]) -> bool:
    """Whether deleting these gives what is lacking."""
    for _, size in removable:
        lacking = _after(lacking, size)
    return not lacking


def _after(lacking: list[tuple[Allowance, Size]], freed: Size) -> list[tuple[Allowance, Size]]:
    left = [(a, Size(by.num_bytes - freed.num_bytes, by.num_files - freed.num_files)) for a, by in lacking]
    return [(a, by) for a, by in left if by.num_bytes > 0 or by.num_files > 0]


def _bytes(number: float) -> str:
    scale, unit = (1 << 30, "GiB") if number >= 1 << 30 else (1 << 20, "MiB")
    return f"{number / scale:.3g} {unit}" if number < math.inf else "any bytes"


def _files(number: float) -> str:
    return f" and {number:.0f} files" if number < math.inf else ""
