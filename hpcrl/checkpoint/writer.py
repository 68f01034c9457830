"""A separate process that writes a rank's checkpoint files while the rank continues to train.

    python -m hpcrl.checkpoint.writer SOCKET PARENT      started by Writer

The data is in anonymous shared memory: nothing is copied, and nothing is left if either process is killed. The process
does not import torch, so it starts in a tenth of a second and needs little memory.

If training waits for the save, a thread of the rank writes the tensors directly from the rank's memory instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hpcrl.checkpoint.commit import FileEntry
from hpcrl.system.files import fsync_path
from hpcrl.system.signals import die_with, held_back, ignore_signals

CHUNK_BYTES = 64 << 20  # bytes per sync to disk; progress counts only synced bytes
MAX_FILES = 250  # with two more descriptors, within the kernel's limit of 253 per message
COUNTER_BYTES = 8
KILLED_S = 1.0  # wait for a killed process; one that a hanging file system blocks ends later


class SharedFile:
    """A file's content in shared memory, which another process can map."""

    def __init__(self, size: int):
        """OSError if there is not enough memory. `size` is at least 1."""
        self.fd = os.memfd_create("hpcrl-snapshot", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        os.posix_fallocate(self.fd, 0, size)  # reports a lack of memory here instead of a bus error while copying
        self.buffer = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


class Pieces:
    """A file's content as consecutive parts of the rank's memory, which must not change until the file is written."""

    def __init__(self, size: int, parts: Iterable[memoryview]):
        self.size, self.parts = size, parts


Files = dict[str, bytes | SharedFile | Pieces]
"""A rank's files of a checkpoint by name, in the checkpoint or a folder in it (critic/NAME)."""


class _Request(msgspec.Struct):
    """The files to write into `folder`: name -> content, or the index of the file descriptor for the content."""

    folder: str
    files: dict[str, bytes | int]


class _Answer(msgspec.Struct):
    """One answer per written file has an entry; the last answer has the total seconds or the error instead."""

    entry: FileEntry | None = None
    seconds: float = 0.0
    error: str = ""
    number: int | None = None
    """errno of the error."""


class Written(NamedTuple):
    """The written files in the order given, and the seconds from the first byte until all are on disk."""

    entries: list[FileEntry]
    seconds: float


def _write(
    folder: Path, name: str, parts: Iterable[memoryview], wrote: Callable[[int], None] = lambda _: None
) -> FileEntry:
    """Write a file. `wrote` is called with the number of bytes after each sync to disk."""
    digest, size, unsynced = hashlib.sha256(), 0, 0
    if (inner := (folder / name).parent) != folder:  # `folder` is never created: a later attempt may have removed it
        inner.mkdir(exist_ok=True)
    with open(folder / name, "xb", buffering=0) as file:
        for chunk in (part[at : at + CHUNK_BYTES] for part in parts for at in range(0, len(part), CHUNK_BYTES)):
            digest.update(chunk)
            rest = chunk
            while rest:  # a write may be partial
                rest = rest[file.write(rest) :]
            size, unsynced = size + len(chunk), unsynced + len(chunk)
            if unsynced >= CHUNK_BYTES:  # one long sync at the end of a large file could look like a hang
                os.fsync(file.fileno())
                wrote(unsynced)
                unsynced = 0
        os.fsync(file.fileno())
        wrote(unsynced)
    return FileEntry(name, size, digest.hexdigest())


class Writer:
    """Writes a rank's checkpoint files, one set at a time. A thread writes a set with Pieces; a process writes all
    other sets, and is started for the first one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None  # to the process
        self._answers: socket.socket | None = None  # from the writer of the current files
        self._folder = Path()
        self._names: list[str] = []
        self._entries: list[FileEntry] = []
        self._received = b""
        self._counter: SharedFile | None = None
        self.busy = False

    def start(self, folder: Path, files: Files) -> None:
        """Start writing the files into `folder`. Shared files and pieces must not change before result() returns the
        entries. OSError if the process was killed since the last set."""
        assert not self.busy and len(files) < MAX_FILES, f"{self._folder} is still being written, or {len(files)} files"
        self._folder, self._names, self._entries, self.busy = folder, list(files), [], True
        self._received = b""
        self._counter = SharedFile(COUNTER_BYTES)
        if any(isinstance(content, Pieces) for content in files.values()):
            self._answers, theirs = socket.socketpair()
            # A daemon thread does not delay the rank's exit, and unfinished files are never committed.
            arguments = (theirs, folder, _parts(files), self._counter.buffer)
            threading.Thread(target=_serve_here, args=arguments, daemon=True).start()
            return
        shared = [content for content in files.values() if isinstance(content, SharedFile)]
        numbers = {id(content): number for number, content in enumerate(shared)}
        contents = {name: c if isinstance(c, bytes) else numbers[id(c)] for name, c in files.items()}
        # The request is in shared memory, too, since a socket would block the rank until the other side reads.
        body = msgspec.msgpack.encode(_Request(str(folder), contents))
        request = SharedFile(len(body))
        request.buffer[:] = body
        fds = [request.fd, self._counter.fd, *(content.fd for content in shared)]
        try:
            self._answers = self._channel()
            socket.send_fds(self._answers, [b"\0"], fds)
        except BrokenPipeError as error:
            raise self._ended() from error

    def result(self, wait_s: float | None) -> Written | None:
        """Wait until all files are on disk; None if this takes longer than wait_s seconds (None: no limit). OSError
        names the file if it could not be written or the process was killed."""
        assert self.busy and self._answers is not None, "nothing is being written"
        deadline = time.monotonic() + wait_s if wait_s is not None else None
        while True:
            left_s = max(0.0, deadline - time.monotonic()) if deadline is not None else None
            if not select.select([self._answers], [], [], left_s)[0]:
                return None
            if not (received := self._receive()):
                raise self._ended()
            *lines, self._received = (self._received + received).split(b"\n")
            for answer in (msgspec.json.decode(line, type=_Answer) for line in lines):
                if answer.error:
                    self.busy = False
                    error = OSError(answer.error)
                    error.errno = answer.number
                    raise error
                if answer.entry is not None:
                    self._entries.append(answer.entry)
                else:
                    self.busy = False
                    return Written(self._entries, answer.seconds)

    def progress(self) -> tuple[str, int]:
        """The file being written, as last reported to result(), and the total bytes on disk."""
        assert self._counter is not None, "nothing is being written"
        return self._file(), int.from_bytes(self._counter.buffer[:], sys.byteorder)

    def abandon(self) -> None:
        """Kill the process if it is writing; its files stay incomplete. The next set of files starts another one."""
        if not self.busy:
            return
        assert self._answers is self._socket, "what a thread writes cannot be abandoned"
        assert self._process is not None and self._socket is not None
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_S)
        self._socket.close()
        self._socket, self.busy = None, False

    def close(self) -> None:
        """Kill the process, even while it writes."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _channel(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            command = [sys.executable, "-m", "hpcrl.checkpoint.writer", str(theirs.fileno()), str(os.getpid())]
            # Called in the rank's main thread, since the kernel ends the process with the thread that has started it.
            with held_back():
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            theirs.close()
        return self._socket

    def _receive(self) -> bytes:
        assert self._answers is not None
        with contextlib.suppress(ConnectionResetError):  # the process ended before reading the request
            return self._answers.recv(1 << 16)
        return b""

    def _ended(self) -> OSError:
        if self._answers is not self._socket:
            return OSError(f"the thread that writes {self._file()} ended")
        assert self._process is not None
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return OSError(f"the process that writes {self._file()} {how} (pid {self._process.pid})")

    def _file(self) -> str:
        """The first path not reported as written; after the last file, the folder itself."""
        return str(self._folder / [*self._names, ""][len(self._entries)])


def main() -> None:
    """Write the requests from the socket until its other end is closed."""
    channel, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    die_with(parent)
    ignore_signals()
    with contextlib.suppress(ConnectionError):  # the rank has ended without reading every answer
        while _serve_next(channel):
            pass


def _serve_next(channel: socket.socket) -> bool:
    """Write the next request; False if there is none any more."""
    received, fds, _, _ = socket.recv_fds(channel, 1, MAX_FILES + 1)  # contents and two more
    if not received:
        return False
    counter = mmap.mmap(fds[1], COUNTER_BYTES)
    body, *shared = (mmap.mmap(fd, 0, access=mmap.ACCESS_READ) for fd in (fds[0], *fds[2:]))
    for fd in fds:
        os.close(fd)
    request = msgspec.msgpack.decode(body, type=_Request)
    contents = {name: c if isinstance(c, bytes) else shared[c] for name, c in request.files.items()}
    parts = {name: [memoryview(content)] for name, content in contents.items()}
    _serve(channel, Path(request.folder), parts, counter)
    return True


def _parts(files: Files) -> dict[str, Iterable[memoryview]]:
    return {
        name: content.parts
        if isinstance(content, Pieces)
        else [memoryview(content if isinstance(content, bytes) else content.buffer)]
        for name, content in files.items()
    }


def _serve_here(channel: socket.socket, *work: Any) -> None:
    with channel:  # closed after an unforeseen error, which the reader then detects
        _serve(channel, *work)


def _serve(channel: socket.socket, folder: Path, files: Mapping[str, Iterable[memoryview]], counter: mmap.mmap) -> None:
    """Write the files and answer on the channel."""
    path, start = folder, time.perf_counter()

    def wrote(num_bytes: int) -> None:
        # Progress is in shared memory, since the socket would fill up during a long step and block this process.
        total = int.from_bytes(counter[:], sys.byteorder) + num_bytes
        counter[:] = total.to_bytes(COUNTER_BYTES, sys.byteorder)

    try:
        for name, parts in files.items():
            path = folder / name
            entry = _write(folder, name, parts, wrote)
            channel.sendall(_line(_Answer(entry)))
        for path in {(folder / name).parent for name in files} | {folder}:
            fsync_path(path)
        answer = _Answer(seconds=time.perf_counter() - start)
    except OSError as error:  # an error of write() names no file
        answer = _Answer(error=f"{path} cannot be written: {error.strerror}", number=error.errno)
    channel.sendall(_line(answer))


def _line(answer: _Answer) -> bytes:
    return msgspec.json.encode(answer) + b"\n"


if __name__ == "__main__":
    main()
