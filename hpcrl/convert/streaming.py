"""Write files of known layout from tensors that are read row by row: in parallel, resumable after a kill, and complete
under their final name or absent."""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from hpcrl.checkpoint.shards import bytes_of
from hpcrl.convert.sources import TensorSource
from hpcrl.metrics.duration import duration
from hpcrl.system.files import find_room, fsync_path, naming, remove, rename_durably, write_durably

BLOCK_BYTES = 2 << 20
"""Bytes of values that a thread holds at once in the checkpoint's dtype, and again in the output's dtype. Larger blocks
are slower, because malloc returns their memory to the system, so each block gets new pages."""
PART_BYTES = 32 << 20
"""Size of the part of a file that a thread writes. All threads write parts of the same file, one file after another."""
SYNC_BYTES = 256 << 20
PLAN = "plan.sha256"
NOT_COPIED = ("config.json", "metadata.json", "manifest.json", "state.json", "trainer.json")
REPORT_S = 10.0


@dataclass(frozen=True)
class Slot:
    """The position in a file of a tensor's rows from row `first` on, in this shape."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    first: int = 0


@dataclass(frozen=True)
class OutFile:
    """A file to write."""

    name: str
    size: int
    known: tuple[tuple[int, bytes], ...]  # (offset, bytes) of what is not a tensor's values, such as headers
    slots: tuple[Slot, ...]  # the tensors


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a slot."""

    slot: Slot
    first: int
    last: int

    @property
    def offset(self) -> int:
        """The rows' offset in the file."""
        dtype = getattr(torch, self.slot.dtype)
        return self.slot.offset + self.first * math.prod(self.slot.shape[1:]) * int(dtype.itemsize)

    def read(self, source: TensorSource) -> memoryview:
        """The rows' bytes, as in the file."""
        slot = self.slot
        rows = source.read(slot.name, slot.first + self.first, slot.first + self.last)
        return bytes_of(rows.to(getattr(torch, slot.dtype)).contiguous())


class Progression:
    """Shows how many of all bytes are done: a bar on a terminal, elsewhere a line every ten seconds."""

    def __init__(
        self,
        total: int,
        stream: TextIO,
        report_progress: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`report_progress` is called in every add(), and may raise."""
        self._total, self._stream, self._go_on, self._clock = total, stream, report_progress, clock
        self._done = self._skipped = 0
        self._began = self._told = clock()
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        if stream.isatty():
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(file=stream))
            self._task = self._bar.add_task("", total=total)
            self._bar.start()

    def skip(self, num_bytes: int) -> None:
        """Count bytes that an earlier call has written."""
        self._skipped += num_bytes
        if self._bar is not None:
            self._bar.update(self._task, total=self._total - self._skipped)

    def add(self, num_bytes: int) -> None:
        """Count bytes as done."""
        self._go_on()
        with self._lock:
            self._done += num_bytes
            if self._bar is not None:
                self._bar.advance(self._task, num_bytes)
            elif self._clock() - self._told >= REPORT_S:
                self._told = self._clock()
                print(self.line(), file=self._stream, flush=True)

    def line(self) -> str:
        """Bytes done, rate, and time left, as text."""
        seconds = max(self._clock() - self._began, 1e-9)
        rate, done = self._done / seconds, self._done + self._skipped
        left = f"  ETA {duration((self._total - done) / rate)}" if rate else ""
        return f"{done / 1e9:.3g} of {self._total / 1e9:.3g} GB  {rate / 1e6:.0f} MB/s{left}"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def write_folder(
    output: Path,
    files: Sequence[OutFile],
    source: TensorSource,
    small: Callable[[Path], None],
    *,
    identity: Any,
    num_threads: int,
    verify: bool,
    stream: TextIO,
    report_progress: Callable[[], None] = lambda: None,
    fence: Callable[[], None] = lambda: None,
    again: bool = False,
) -> int:
    """Write the files into the new folder `output`; returns the bytes that this call has written. A killed call leaves
    `.NAME.converting`, from which a call with the same `identity` continues.

    Args:
        small: Called with the folder to write further, small files.
        verify: Read everything back and compare it.
        report_progress, fence: See ConvertOptions.
        again: Return 0 at once if the output exists with these files.

    ValueError if the output exists, another process writes it, or the disk has too little space. OSError if a file
    cannot be written.
    """
    if output.is_symlink() or (output.exists() and (not output.is_dir() or any(output.iterdir()))):
        if again and all(_size(output / file.name) == file.size for file in files):
            return 0
        raise ValueError(f"--output {output} exists, and nothing is overwritten; name another folder or remove it")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.converting")
    if partial.is_symlink():
        raise ValueError(f"{partial} is a symbolic link; remove it")
    partial.mkdir(exist_ok=True)
    with _alone(partial, output):
        done = _resumed(partial, files, identity)
        needed = sum(file.size for file in files if file.name not in done)
        free, refused = find_room(partial, needed, reserve=needed > 0)
        if free < needed or refused:
            why = refused or f"the file system has {free / 1e9:.3g} GB free"
            if not done:
                remove(partial)
            raise ValueError(f"--output {output} needs another {needed / 1e9:.3g} GB: {why}")
        progress = Progression(sum(file.size for file in files) * (1 + verify), stream, report_progress)
        try:
            progress.skip(sum(file.size for file in files if file.name in done))
            growing = [_Growing(partial, file, source, progress) for file in files if file.name not in done]
            try:
                _in_threads([job for file in growing for job in file.jobs()], num_threads)
            finally:
                for file in growing:
                    file.drop()
            if verify:
                checks = (_checking(partial, file, source, progress) for file in files)
                _in_threads([job for jobs in checks for job in jobs], num_threads)
        finally:
            progress.close()
        small(partial)
        for entry in partial.iterdir():
            fsync_path(entry)
        fence()
        (partial / PLAN).unlink()
        fsync_path(partial)
        rename_durably(partial, output)
    return needed


@contextmanager
def _alone(partial: Path, output: Path) -> Iterator[None]:
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise ValueError(f"--output {output}: another conversion is writing it") from error
            # The file system has no locks: the conversion continues without this check.
        yield
    finally:
        os.close(descriptor)


def _resumed(partial: Path, files: Sequence[OutFile], identity: Any) -> set[str]:
    """The files that an earlier call with the same identity has completed; other files are removed."""
    text = repr((identity, [(file.name, file.size, file.slots) for file in files]))
    plan = hashlib.sha256(text.encode()).hexdigest().encode()
    same = (partial / PLAN).is_file() and (partial / PLAN).read_bytes() == plan
    sizes = {file.name: file.size for file in files} if same else {}
    done = set()
    for entry in partial.iterdir():
        if sizes.get(entry.name) == entry.stat().st_size:
            done.add(entry.name)
        elif entry.name != PLAN or not same:
            remove(entry)
    if not same:
        write_durably(partial / PLAN, plan)
    return done


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _in_threads(jobs: Sequence[Callable[[threading.Event], None]], num_threads: int) -> None:
    stopped = threading.Event()
    with ThreadPoolExecutor(num_threads) as threads:
        running = [threads.submit(job, stopped) for job in jobs]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            stopped.set()  # after an error or Ctrl-C, the other threads end before their next block
            threads.shutdown(cancel_futures=True)
    for future in running:
        if not future.cancelled() and (error := future.exception()) is not None:
            raise error


class _Growing:
    """A file that several threads write, part by part. It gets its final name when all parts are written."""

    def __init__(self, folder: Path, file: OutFile, source: TensorSource, progress: Progression):
        self._path, self._temporary = folder / file.name, folder / f"{file.name}.part"
        self._file, self._source, self._progress = file, source, progress
        self._parts = _parts(file, source)
        self._left, self._unsynced = len(self._parts), 0
        self._lock = threading.Lock()
        self._out: BinaryIO | None = None

    def jobs(self) -> list[Callable[[threading.Event], None]]:
        """One job per part."""
        return [functools.partial(self._write, part) for part in self._parts]

    def drop(self) -> None:
        """Remove an incomplete file, which would otherwise occupy space on a full disk."""
        if self._out is not None:
            self._out.close()
            self._temporary.unlink(missing_ok=True)

    def _write(self, part: Sequence[Block], stopped: threading.Event) -> None:
        with naming(self._path):
            out = self._begin()
            written = 0
            for block in part:
                if stopped.is_set():
                    return
                numbers = block.read(self._source)
                _write_at(out.fileno(), numbers, block.offset)
                self._progress.add(len(numbers))
                written += len(numbers)
            self._end(out, written)

    def _begin(self) -> BinaryIO:
        with self._lock:
            if self._out is None:
                self._out = open(self._temporary, "wb", buffering=0)  # noqa: SIM115 - the last part closes it
                for offset, known in self._file.known:
                    _write_at(self._out.fileno(), known, offset)
            return self._out

    def _end(self, out: BinaryIO, written: int) -> None:
        with self._lock:
            self._left -= 1
            self._unsynced += written
            is_last, is_due = self._left == 0, self._unsynced >= SYNC_BYTES
            self._unsynced = 0 if is_due else self._unsynced
        if is_last:
            os.ftruncate(out.fileno(), self._file.size)
            os.fsync(out.fileno())
            out.close()
            os.rename(self._temporary, self._path)
        elif is_due:
            os.fdatasync(out.fileno())


def _checking(
    folder: Path, file: OutFile, source: TensorSource, progress: Progression
) -> list[Callable[[threading.Event], None]]:
    """Jobs that read a file back, one per part."""

    def check(part: Sequence[Block], known: Sequence[tuple[int, bytes]], stopped: threading.Event) -> None:
        with open(folder / file.name, "rb", buffering=0) as written:
            for offset, content in known:
                if os.pread(written.fileno(), len(content), offset) != content:
                    raise ValueError(f"{folder / file.name} differs from what was written, at byte {offset}")
            for block in part:
                if stopped.is_set():
                    return
                numbers = block.read(source)
                if os.pread(written.fileno(), len(numbers), block.offset) != numbers:
                    raise ValueError(
                        f"{folder / file.name} differs from the checkpoint, at byte {block.offset} or after"
                    )
                progress.add(len(numbers))

    with open(folder / file.name, "rb", buffering=0) as written:
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # to read from disk, not from the page cache
    first, *others = _parts(file, source)
    return [functools.partial(check, first, file.known), *(functools.partial(check, part, ()) for part in others)]


def _write_at(descriptor: int, numbers: bytes | memoryview, offset: int) -> None:
    rest = memoryview(numbers)
    while rest:
        count = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count


def _parts(file: OutFile, source: TensorSource) -> list[list[Block]]:
    """The blocks of a file in groups of about PART_BYTES, at least one group."""
    parts: list[list[Block]] = [[]]
    size = 0
    for slot in file.slots:
        dtype = getattr(torch, slot.dtype)
        numbers_per_row = math.prod(slot.shape[1:])
        held = numbers_per_row * max(dtype.itemsize, source.dtypes[slot.name].itemsize)
        count = max(1, BLOCK_BYTES // max(1, held))
        for first in range(0, slot.shape[0], count):
            block = Block(slot, first, min(first + count, slot.shape[0]))
            if size >= PART_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(block)
            size += (block.last - first) * numbers_per_row * dtype.itemsize
    return parts


def default_threads() -> int:
    """The number of this process's cores, at most 8, since threads mostly wait for one disk."""
    return min(8, len(os.sched_getaffinity(0)))


def copy_small_files(origin: Path, target: Path) -> None:
    """Copy a model folder's small text and tokenizer files, but no config.json, index or checkpoint file."""
    for file in sorted(origin.iterdir()):
        known = file.suffix in (".json", ".jinja", ".txt", ".model", ".tiktoken")
        if file.is_file() and known and file.name not in NOT_COPIED and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)
