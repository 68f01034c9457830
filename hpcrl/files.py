"""Durable files and numbered step folders: what a killed program leaves is whole or absent."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEP_NAME = re.compile(r"step_(\d{6,})")
STORAGE_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE))
"""Numbers of the errors that a full or failing file system gives, and hardly anything else does."""


def step_name(step: int) -> str:
    """`step_000012` for 12."""
    if step < 0:
        raise ValueError(f"a step counts from 0, got {step}")
    return f"step_{step:06d}"


def steps_in(folder: Path) -> list[int]:
    """Steps that have a folder `step_NNNNNN` in `folder`, rising; empty where there is no such folder."""
    if not folder.is_dir():
        return []
    found = (STEP_NAME.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in found if match)


def committed_step(run_dir: Path) -> int:
    """Step of the newest checkpoint that a run has committed, -1 without one.

    Only a commit gives a folder its final name (checkpoint/commit.py), so the name says it; contents are not verified.
    """
    return max(steps_in(run_dir / "checkpoints"), default=-1)


def backed_off_s(waited_s: float, least_s: float = 0.02) -> float:
    """How long to sleep before the next look at a shared file system after `waited_s`: a twentieth of it, so that
    hundreds of processes which wait for long do not ask fifty times a second each."""
    return min(max(least_s, waited_s / 20), 1.0)


def fsync_path(path: Path) -> None:
    """Push a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def no_room_for(folder: Path, num_bytes: int) -> str:
    """Why the user may not write so many bytes into a folder: free space that the file system shows may be more than
    the user's quota. Empty where they could be reserved, or where the file system reserves nothing (NFS 3, ZFS)."""
    # Not os.posix_fallocate, which writes to each block where the file system reserves nothing.
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
    fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            refused = ctypes.get_errno() if fallocate(file.fileno(), 0, 0, num_bytes) else 0
    except OSError as error:
        return error.strerror or str(error)
    return os.strerror(refused) if refused in STORAGE_ERRORS else ""


def rename_durably(source: Path, target: Path) -> None:
    """Rename, so that after a crash of the machine the entry stands in exactly one of both folders."""
    os.rename(source, target)
    fsync_path(target.parent)
    if source.parent != target.parent:
        fsync_path(source.parent)


def is_storage_error(error: BaseException) -> bool:
    """Whether a full or failing file system is the cause, so that the same may go well another time."""
    return isinstance(error, OSError) and error.errno in STORAGE_ERRORS


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError that is raised inside names `path` where it names no file; those of write() and fsync() do not."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


class _Lossy(io.FileIO):
    """A file that takes what a full disk does not."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not is_storage_error(error):
                raise
            return memoryview(data).nbytes


def shield_output() -> None:
    """From now on what this process prints is lost where the disk of its log is full, and does not end it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.flush()
        buffer = io.BufferedWriter(_Lossy(stream.fileno(), "w", closefd=False))
        text = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=stream.line_buffering)
        setattr(sys, name, text)


def write_durably(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step: temporary file beside it, fsync, rename, fsync of the folder.

    OSError names the file; then `path` is as it was, and nothing is left beside it.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with naming(path), open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)  # what fits of it would keep the disk full
        raise
    rename_durably(temporary, path)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` to fill, which takes the place of `path` at the end, and is removed where that is not
    reached. Its files are pushed to the disk and get the permissions that new files have."""
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
    """Let the files below a new folder have the permissions of new files, as the umask gave its own to the folder;
    safetensors makes files that nobody else may read."""
    mode = 0o666 & (folder.stat().st_mode | 0o600)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)


def remove(path: Path) -> None:
    """Remove a file or a folder with all in it, of a symbolic link the link alone; nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
