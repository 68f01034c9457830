"""Environments in processes of their own (env.NAME.runs_in=process): one that hangs, crashes, leaks or forks is killed
with all its processes, and costs its own episode only.

A process of each section (hpcrl.envs.zygote) has imported the environment and forks one process per episode, which
takes milliseconds. It dies with the rank, and the others with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config import EnvConfig
from hpcrl.system.signals import held_back

LENGTH = struct.Struct("<I")
PID = struct.Struct("<i")
"""Of a new process, or minus the error number of the fork that failed."""
START_TIMEOUT_S = 120.0
MAX_BYTES = 64 << 20
"""Longest message from a process."""
CLOSE_S = 5
"""Seconds for the close() of an environment, which is then killed."""


class MakeEnv(msgspec.Struct, tag="make"):
    """The first message to a process: the row of its prompt, and the template of make_env()."""

    row: dict[str, Any]
    chat_template: str = ""


class ResetEnv(msgspec.Struct, tag="reset"):
    seed: int


class StepEnv(msgspec.Struct, tag="step"):
    action: str


EnvCall = MakeEnv | ResetEnv | StepEnv


class EnvReturned(msgspec.Struct):
    """What a call returned, in terms of JSON; `error`: what it raised."""

    value: Any = None
    error: str = ""


class EnvProcessError(RuntimeError):
    """An environment raised in its process, or the process ended."""


class EnvProcesses:
    """The processes of a section's environments. Create it on the main thread: Linux kills them when the thread that
    started them ends. Other methods may be called in any thread."""

    def __init__(self, config: EnvConfig, section: str = "default"):
        """section: its name in the configuration, for errors. ValueError if the environment cannot be loaded in a
        process."""
        self._lock, self._name = threading.Lock(), config.name
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_TIMEOUT_S)
        with held_back(), theirs:
            self._zygote = subprocess.Popen(
                [sys.executable, "-m", "hpcrl.envs.zygote", str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        write(self._control, config.model_dump_json().encode())
        write(self._control, section.encode())
        try:
            if problem := read(self._control).decode():
                self.close()
                raise ValueError(problem)
        except (OSError, EOFError) as error:
            self.close()
            raise ValueError(f"env.{section}: the process that loads it ends or does not answer: {error}") from error
        self._control.settimeout(None)  # an answer that comes late must not be taken for the next one

    def check(self) -> None:
        """RuntimeError if there can be no more processes, which is no fault of a sample."""
        if (code := self._zygote.poll()) is not None:
            raise RuntimeError(f"the process that forks those of environment {self._name} has ended with code {code}")

    def make(self, row: dict[str, Any], chat_template: str = "") -> EnvProcess:
        """An environment for a row, in a new process, which makes it in its first call. EnvProcessError if there can be
        no process."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
                pid = PID.unpack(_exactly(self._control, PID.size))[0]
            except (OSError, EOFError) as error:
                ours.close()
                raise EnvProcessError(f"no process for the environment: {error}") from error
        if pid < 0:
            ours.close()
            raise EnvProcessError(f"no process for the environment: {os.strerror(-pid)}")
        return EnvProcess(ours, pid, MakeEnv(row, chat_template))

    def close(self) -> None:
        """End all processes (idempotent): those of closed environments have CLOSE_S seconds."""
        self._control.close()
        try:
            self._zygote.wait(2 * CLOSE_S)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.wait()


class EnvProcess:
    """An environment in another process, with the protocol of Env. close() may be called in another thread than the one
    that waits for a call, which then raises EnvProcessError."""

    def __init__(self, connection: socket.socket, pid: int, make: MakeEnv):
        self._connection, self._pid, self._make = connection, pid, make
        self._at_work, self._closed = False, False
        self.special_tokens = False  # of the environment, once it is made

    def reset(self, seed: int) -> Any:
        """See Env."""
        self.special_tokens = bool(self._call(self._make))
        return self._call(ResetEnv(seed))

    def step(self, action: str) -> Any:
        """See Env."""
        return self._call(StepEnv(action))

    def busy_s(self) -> float:
        """See busy_s() of its process."""
        return busy_s(str(self._pid))

    def close(self) -> None:
        """Let the environment close itself, and end its process with all that it started (idempotent); at once if it is
        at work or has ended by itself."""
        if self._closed:
            return
        self._closed = True
        if self._at_work:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _call(self, message: EnvCall) -> Any:
        """What comes back. EnvProcessError if it raises, or its process is gone."""
        self._at_work = True  # stays if the process has ended, so that close() kills what it has left
        try:
            write(self._connection, msgspec.msgpack.encode(message))
            returned = msgspec.msgpack.decode(read(self._connection, MAX_BYTES), type=EnvReturned)
        except (OSError, EOFError):
            raise EnvProcessError("the environment's process has ended") from None
        except ValueError as error:
            raise EnvProcessError(f"the environment's process returned {error}") from None
        self._at_work = False
        if returned.error:
            raise EnvProcessError(returned.error)
        return returned.value


def computed_s(task: str) -> float:
    """Seconds for which a process or thread has computed, by its folder in /proc; 0 if it is gone."""
    try:
        user, system = Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def busy_s(task: str) -> float:
    """Seconds for which a process or thread has computed or waited for a core; 0 if it is gone."""
    try:
        computed, delayed, *_ = Path(f"/proc/{task}/schedstat").read_text().split()
    except (OSError, ValueError):  # a kernel without these statistics
        return computed_s(task)
    return (int(computed) + int(delayed)) / 1e9


def write(connection: socket.socket, body: bytes) -> None:
    """Send a message after its length."""
    connection.sendall(LENGTH.pack(len(body)) + body)


def read(connection: socket.socket, most_bytes: int | None = None) -> bytes:
    """Receive a message. EOFError if the other side has closed, ValueError for a message that is longer."""
    count = LENGTH.unpack(_exactly(connection, LENGTH.size))[0]
    if most_bytes is not None and count > most_bytes:
        raise ValueError(f"{count} bytes, of which {most_bytes} are read at most")
    return _exactly(connection, count)


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        block = connection.recv(min(count - len(found), 1 << 20))
        if not block:
            raise EOFError("the connection was closed")
        found += block
    return bytes(found)
