"""The client's side of a sandbox job: tasks, limits, pipes, outcome."""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcrl.system.clock import AwakeClock

ANSWER_S = 30.0
"""Maximum seconds that the server may take to end a job."""


@dataclass(frozen=True)
class Limits:
    """A job's limits.

    Args:
        memory_bytes: The limit on the memory of all processes together, and on each process's address space.
        file_bytes: The limit on a file's size. All files together may take four times this.
        processes: The limit on processes and threads.
        output_bytes: The limit on each output: stdout, stderr and the result.
    """

    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    processes: int = 16
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class ChildTask:
    """A child's task, as perform() in hpcrl.sandbox.tasks expects it, and its standard input."""

    what: Mapping[str, Any]
    stdin: bytes = b""


@dataclass
class JobOutcome:
    """How a job's last task ended.

    Args:
        code: The exit code, or minus the signal's number.
        stopped: The limit that ended the job (time, memory, processes, files or output), or empty.
        result: The result of a call or of tests, as sent by the task.
        seconds: The duration, without time in which this process was suspended.
    """

    code: int = 0
    stopped: str = ""
    stdout: bytes = b""
    stderr: bytes = b""
    result: bytes = b""
    seconds: float = 0.0


class SandboxError(RuntimeError):
    """The sandbox itself failed, not the code in it."""


class SandboxJob:
    """A job's pipes, on the client's side."""

    def __init__(self, tasks: Sequence[ChildTask], output_bytes: int):
        self.places: list[int] = []
        """The children's file descriptors, in the order that the server expects."""
        self._most = output_bytes
        self._selector = selectors.DefaultSelector()
        self._outputs: dict[str, bytearray] = {}
        self._reads: dict[int, str] = {}
        self._writes: dict[int, memoryview] = {}
        ends = [end.detach() for end in socket.socketpair()] if len(tasks) > 1 else []
        for number, task in enumerate(tasks):
            last = number == len(tasks) - 1
            self.places.append(self._source(json.dumps(task.what).encode()))
            self.places.append(self._source(task.stdin) if task.stdin else _nothing())
            self.places += [self._sink(name) if last else _nothing() for name in ("stdout", "stderr", "result")]
            self.places.append(ends[number] if ends else _nothing())

    def _source(self, data: bytes) -> int:
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write, False)
        self._writes[write] = memoryview(data)
        self._selector.register(write, selectors.EVENT_WRITE)
        return read

    def _sink(self, name: str) -> int:
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read, False)
        self._outputs[name], self._reads[read] = bytearray(), name
        self._selector.register(read, selectors.EVENT_READ)
        return write

    def give(self, control: socket.socket, header: Mapping[str, Any]) -> None:
        """Send the children's ends of the pipes to the server."""
        try:
            socket.send_fds(control, [json.dumps(header).encode()], self.places)
        finally:
            for place in self.places:
                os.close(place)

    def wait(self, control: socket.socket, timeout_s: float) -> JobOutcome:
        """Write to and read from the pipes until the server reports the job's end. OSError if it does not."""
        self._selector.register(control, selectors.EVENT_READ)
        clock, stopped, asked_s = AwakeClock(timeout_s), "", 0.0
        answer: dict[str, Any] = {}
        while not answer:
            for key, _ in self._selector.select(timeout_s / 8):
                if key.fileobj is control:
                    answer = _answer(control)
                elif key.fd in self._writes:
                    self._feed(key.fd)
                elif not self._take(key.fd) and not stopped:
                    stopped, asked_s = "output", _end(control)
            if not (answer or stopped) and clock.now() > timeout_s:
                stopped, asked_s = "time", _end(control)
            if not answer and stopped and time.monotonic() - asked_s > ANSWER_S:
                raise TimeoutError(f"a job does not end in {ANSWER_S:g} s")
        for place in list(self._reads):  # all writers have ended
            while place in self._reads and self._take(place):
                pass
        if answer["reason"].startswith("lost"):
            raise SandboxError(answer["reason"])
        if answer["reason"] not in ("", "ended"):
            stopped = answer["reason"]
        elif not answer["reason"] and stopped == "time":
            stopped = ""  # the task had ended by itself, before this process or the server noticed
        outputs = {name: bytes(data[: self._most]) for name, data in self._outputs.items()}
        return JobOutcome(os.waitstatus_to_exitcode(answer["status"]), stopped, seconds=clock.now(), **outputs)

    def _feed(self, place: int) -> None:
        try:
            self._writes[place] = self._writes[place][os.write(place, self._writes[place]) :]
            done = not self._writes[place]
        except BrokenPipeError:
            done = True
        if done:
            self._drop(place)
            del self._writes[place]

    def _take(self, place: int) -> bool:
        """Read the available bytes; False if this output is too long, in which case the rest is not read."""
        output = self._outputs[self._reads[place]]
        try:
            data = os.read(place, 1 << 16)
        except BlockingIOError:
            return False
        output += data
        if data and len(output) <= self._most:
            return True
        self._drop(place)
        del self._reads[place]
        return not data

    def _drop(self, place: int) -> None:
        self._selector.unregister(place)
        os.close(place)

    def close(self) -> None:
        """Close all open pipes."""
        for place in [*self._reads, *self._writes]:
            os.close(place)
        self._reads, self._writes = {}, {}
        self._selector.close()


def _nothing() -> int:
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _answer(control: socket.socket) -> dict[str, Any]:
    data = control.recv(1 << 16)
    if not data:
        raise ConnectionError("its server is gone")
    found: dict[str, Any] = json.loads(data)
    return found


def _end(control: socket.socket) -> float:
    control.send(b'{"end": true}')
    return time.monotonic()
