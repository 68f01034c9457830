"""A process beside a rank that writes the rank's files of a checkpoint while the rank trains on.

    python -m hpcrl.checkpoint.writer SOCKET PARENT      started by Writer, never by hand

What is to be written lies in anonymous shared memory: nothing is copied, and nothing is left when either process is
killed. The process imports no torch, so that it starts in a tenth of a second and stays small.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.checkpoint.commit import FileEntry
from hpcrl.files import fsync_path
from hpcrl.signals import held_back, ignore_signals

CHUNK_BYTES = 64 << 20  # what counts as progress, once it is on the disk
MAX_FILES = 250  # the kernel passes no more descriptors at once
COUNTER_BYTES = 8
PR_SET_PDEATHSIG = 1


class SharedFile:
    """The content of a file in memory that another process can map: `buffer` here, `fd` to hand on."""

    def __init__(self, size: int):
        """OSError where there is no memory for it. `size` is at least 1."""
        self.fd = os.memfd_create("hpcrl-snapshot", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        os.posix_fallocate(self.fd, 0, size)  # lacking memory is an error here, and not a bus error while copying
        self.buffer = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


Files = dict[str, bytes | SharedFile]
"""A rank's files of a checkpoint by name, without folders."""


class _Request(msgspec.Struct):
    """folder: where to write; files: name -> content, or the number of the descriptor whose content it is."""

    folder: str
    files: dict[str, bytes | int]


class _Answer(msgspec.Struct):
    """One line per file as it is written; the last has no entry but the seconds it took, or what went wrong."""

    entry: FileEntry | None = None
    seconds: float = 0.0
    error: str = ""


class Written(NamedTuple):
    """What a writer has done: files in the order given, and the seconds from its first byte to the disk."""

    entries: list[FileEntry]
    seconds: float


def write_files(folder: Path, files: Mapping[str, bytes | SharedFile]) -> list[FileEntry]:
    """Write files into a folder, push them to the disk, and return their sizes and hashes."""
    entries = []
    for name, content in files.items():
        entries.append(_write(folder / name, memoryview(content if isinstance(content, bytes) else content.buffer)))
    fsync_path(folder)
    return entries


def _write(path: Path, content: memoryview, wrote: Callable[[int], None] = lambda _: None) -> FileEntry:
    """`wrote` is told of the bytes of every part when it is on the disk."""
    digest = hashlib.sha256()
    with open(path, "xb", buffering=0) as file:
        for start in range(0, len(content), CHUNK_BYTES):
            part = rest = content[start : start + CHUNK_BYTES]
            digest.update(part)
            while rest:  # the system may take less than it is given
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())  # else the whole file may wait for its end, which looks like a hang
            wrote(len(part))
        os.fsync(file.fileno())
    return FileEntry(path.name, len(content), digest.hexdigest())


class Writer:
    """A rank's writer process, started with the first files. One set of files is written at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._folder = Path()
        self._names: list[str] = []
        self._entries: list[FileEntry] = []
        self._received = b""
        self._counter: SharedFile | None = None
        self.busy = False

    def start(self, folder: Path, files: Files) -> None:
        """Let the files be written into `folder`. Shared ones must not change before result() gives the entries.

        OSError where the process has been killed since the last files.
        """
        assert not self.busy and len(files) < MAX_FILES, f"{self._folder} is still being written, or {len(files)} files"
        shared = [content for content in files.values() if isinstance(content, SharedFile)]
        numbers = {id(content): number for number, content in enumerate(shared)}
        contents = {name: c if isinstance(c, bytes) else numbers[id(c)] for name, c in files.items()}
        # The request too goes as memory: a socket would hold the rank up until the other side reads.
        body = msgspec.msgpack.encode(_Request(str(folder), contents))
        request = SharedFile(len(body))
        request.buffer[:] = body
        self._folder, self._names, self._entries, self.busy = folder, list(files), [], True
        self._counter = SharedFile(COUNTER_BYTES)
        fds = [request.fd, self._counter.fd, *(content.fd for content in shared)]
        try:
            socket.send_fds(self._channel(), [b"\0"], fds)
        except BrokenPipeError as error:
            raise self._ended() from error

    def result(self, wait_s: float | None) -> Written | None:
        """What has been written, once all of it is on the disk, for which it waits so long (None: to the end); before
        that None.

        OSError names the file that could not be written, also when the process was killed.
        """
        assert self.busy and self._socket is not None, "nothing is being written"
        deadline = time.monotonic() + wait_s if wait_s is not None else None
        while True:
            left_s = max(0.0, deadline - time.monotonic()) if deadline is not None else None
            if not select.select([self._socket], [], [], left_s)[0]:
                return None
            if not (news := self._receive()):
                raise self._ended()
            *lines, self._received = (self._received + news).split(b"\n")
            for answer in (msgspec.json.decode(line, type=_Answer) for line in lines):
                if answer.error:
                    raise OSError(answer.error)
                if answer.entry is not None:
                    self._entries.append(answer.entry)
                else:
                    self.busy = False
                    return Written(self._entries, answer.seconds)

    def progress(self) -> tuple[str, int]:
        """The file that is being written, as far as result() has heard, and the bytes on the disk in all."""
        assert self._counter is not None, "nothing is being written"
        return self._file(), int.from_bytes(self._counter.buffer[:], sys.byteorder)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _channel(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            command = [sys.executable, "-m", "hpcrl.checkpoint.writer", str(theirs.fileno()), str(os.getpid())]
            # Its thread is the rank's main one: the kernel ends the process with the thread that started it.
            with held_back():
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            theirs.close()
        return self._socket

    def _receive(self) -> bytes:
        assert self._socket is not None
        with contextlib.suppress(ConnectionResetError):  # it ended before it had read the request
            return self._socket.recv(1 << 16)
        return b""

    def _ended(self) -> OSError:
        assert self._process is not None
        code = self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return OSError(f"the process that writes {self._file()} {how} (pid {self._process.pid})")

    def _file(self) -> str:
        """The path after those that are known to be written, at last the folder itself."""
        return str(self._folder / [*self._names, ""][len(self._entries)])


def main() -> None:
    """Write what comes over the socket until its other end is closed."""
    channel, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        return
    ignore_signals()
    while True:
        news, fds, _, _ = socket.recv_fds(channel, 1, MAX_FILES + 1)  # fewer contents than that, and two of its own
        if not news:
            return
        counter = mmap.mmap(fds[1], COUNTER_BYTES)
        body, *shared = (mmap.mmap(fd, 0, access=mmap.ACCESS_READ) for fd in (fds[0], *fds[2:]))
        for fd in fds:
            os.close(fd)
        _serve(channel, msgspec.msgpack.decode(body, type=_Request), shared, counter)


def _serve(channel: socket.socket, request: _Request, shared: Sequence[mmap.mmap], counter: mmap.mmap) -> None:
    folder, start = Path(request.folder), time.perf_counter()
    path = folder

    def wrote(num_bytes: int) -> None:
        # In memory, and not over the socket: that would fill while the rank is in a long step, and hold this one up.
        total = int.from_bytes(counter[:], sys.byteorder) + num_bytes
        counter[:] = total.to_bytes(COUNTER_BYTES, sys.byteorder)

    try:
        for name, content in request.files.items():
            path = folder / name
            entry = _write(path, memoryview(content if isinstance(content, bytes) else shared[content]), wrote)
            channel.sendall(_line(_Answer(entry)))
        path = folder
        fsync_path(folder)
        answer = _Answer(seconds=time.perf_counter() - start)
    except OSError as error:  # one of write() names no file
        answer = _Answer(error=f"{path} cannot be written: {error.strerror}")
    channel.sendall(_line(answer))


def _line(answer: _Answer) -> bytes:
    return msgspec.json.encode(answer) + b"\n"


if __name__ == "__main__":
    main()
