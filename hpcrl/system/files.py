"""Durable files and numbered step folders: after a kill, a file is complete or absent."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import random
import re
import resource
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hpcrl.system.clock import AwakeClock

STEP_NAME = re.compile(r"step_(\d{6,})")
STORAGE_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE))
"""Error numbers that nearly always mean a full or failing file system."""
CONTENDED_S = 5.0
"""How long find_room() retries, since other processes may have reserved space for a moment."""


def step_name(step: int) -> str:
    """`step_000012` for 12."""
    if step < 0:
        raise ValueError(f"a step counts from 0, got {step}")
    return f"step_{step:06d}"


def steps_in(folder: Path) -> list[int]:
    """Steps that have a folder `step_NNNNNN` in `folder`, ascending; empty if `folder` does not exist."""
    if not folder.is_dir():
        return []
    found = (STEP_NAME.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in found if match)


def committed_step(run_dir: Path) -> int:
    """Step of the newest committed checkpoint of a run, -1 without one. Only a commit gives a folder its final name
    (checkpoint/commit.py), so contents are not verified."""
    return max(steps_in(run_dir / "checkpoints"), default=-1)


def backed_off_s(waited_s: float) -> float:
    """Seconds to sleep before the next read of a shared file system: a twentieth of the time waited so far, to keep
    hundreds of waiting processes from overloading the file system."""
    return min(max(0.02, waited_s / 20), 1.0)


def fsync_path(path: Path) -> None:
    """Sync a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> BinaryIO:
    """A file of a folder that others write, open for reading. OSError for anything but a regular file: opening a named
    pipe would wait for a writer, and a device may have no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")


def find_room(folder: Path, num_bytes: int, reserve: bool) -> tuple[int, str]:
    """(free bytes that the file system shows, no_room_for()'s reason if they suffice and `reserve` is set).

    Other runs that start at the same time also reserve space for a moment, so if space is short, the check is repeated
    at random times for CONTENDED_S.
    """
    clock, wait_s = AwakeClock(CONTENDED_S), 0.05
    while True:
        free = shutil.disk_usage(folder).free
        refused = no_room_for(folder, num_bytes) if reserve and free >= num_bytes else ""
        if (free >= num_bytes and not refused) or clock.now() >= CONTENDED_S:
            return free, refused
        time.sleep(random.uniform(0, wait_s))
        wait_s = min(2 * wait_s, 1.0)


def no_room_for(folder: Path, num_bytes: int) -> str:
    """Why the user may not write this many bytes into a folder, such as a quota, which free space does not show. Empty
    if they could be reserved, or if the file system does not support reservations (NFS 3, ZFS)."""
    # Not os.posix_fallocate, which writes to each block if the file system does not support reservations.
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)  # musl has none
    if fallocate is None:
        return ""
    fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            refused = ctypes.get_errno() if fallocate(file.fileno(), 0, 0, num_bytes) else 0
    except OSError as error:
        return error.strerror or str(error)
    return os.strerror(refused) if refused in STORAGE_ERRORS else ""


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file or folder; after a crash of the machine it is in exactly one of the two folders."""
    os.rename(source, target)
    fsync_path(target.parent)
    if source.parent != target.parent:
        fsync_path(source.parent)


def allow_files() -> int:
    """Raise the limit on open files and sockets of this process and its children to the system's maximum, and return
    it; the usual limit of 1,024 is less than rank 0 of a large world needs."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize


def is_storage_error(error: BaseException | None) -> bool:
    """Whether a full or failing file system is the cause, in which case a retry may succeed."""
    return isinstance(error, OSError) and error.errno in STORAGE_ERRORS


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to an OSError raised inside that names no file, as write() and fsync() do."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


class _Lossy(io.FileIO):
    """A text stream that discards writes for which the disk is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not is_storage_error(error):
                raise
            return memoryview(data).nbytes


def shield_output() -> None:
    """Make this process drop output, instead of ending, if its log's disk is full."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.flush()
        buffer = io.BufferedWriter(_Lossy(stream.fileno(), "w", closefd=False))
        text = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=stream.line_buffering)
        setattr(sys, name, text)


def write_durably(path: Path, data: bytes, writer: str = "") -> None:
    """Replace `path` by `data` atomically: temporary file next to it, fsync, rename, fsync of the folder. OSError names
    the file; then `path` is unchanged, and no temporary file is left. If several processes may write the file at once,
    each one gives another `writer`."""
    temporary = path.with_name(f".{path.name}{writer and f'.{writer}'}.tmp")
    try:
        with naming(path), open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)  # a partial file would keep the disk full
        raise
    rename_durably(temporary, path)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder next to `path` that replaces it at the end, and is removed after an error. Its files are
    synced to disk and get the usual permissions."""
    partial, before = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.old")
    for left in (partial, before):
        remove(left)
    partial.mkdir(parents=True)
    try:
        yield partial
        give_usual_modes(partial)
        for file in partial.rglob("*"):
            with naming(file):
                fsync_path(file)
        fsync_path(partial)
        if path.exists() or path.is_symlink():
            path.rename(before)
        rename_durably(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    remove(before)


def give_usual_modes(folder: Path) -> None:
    """Give the files below a new folder the permissions of the umask; safetensors creates files that only their owner
    can read."""
    mode = 0o666 & (folder.stat().st_mode | 0o600)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)


def remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a symbolic link itself, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
