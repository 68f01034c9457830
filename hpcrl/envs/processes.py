"""Environments in separate processes (env.NAME.runs_in=process): an environment that hangs, crashes, leaks or forks is
killed with all its processes, and only its own episode fails.

One process per section (hpcrl.envs.zygote) has imported the environment and forks one process per episode, which takes
milliseconds. It dies with the rank, and its forks die with it.
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
"""Process id of a new process, or minus the error number of a failed fork."""
START_TIMEOUT_S = 120.0
MAX_BYTES = 64 << 20
"""Maximum size of a message from a process."""
CLOSE_S = 5
"""Timeout of an environment's close(), after which its process is killed."""


class MakeEnv(msgspec.Struct, tag="make"):
    """The first message to a process, with the arguments of make_env()."""

    row: dict[str, Any]
    chat_template: str = ""


class ResetEnv(msgspec.Struct, tag="reset"):
    seed: int


class StepEnv(msgspec.Struct, tag="step"):
    action: str


class AskExpert(msgspec.Struct, tag="expert"):
    seed: int


EnvCall = MakeEnv | ResetEnv | StepEnv | AskExpert


class EnvReturned(msgspec.Struct):
    """A call's result as JSON types, with images as bytes, or its exception in `error`."""

    value: Any = None
    error: str = ""


class EnvProcessError(RuntimeError):
    """An environment raised in its process, or the process ended."""


class EnvProcesses:
    """The processes of a section's environments. Create it on the main thread: Linux kills the processes when the
    thread that started them ends. Other methods may be called in any thread."""

    def __init__(self, config: EnvConfig, section: str = "default"):
        """`section` is its name, for errors. ValueError if the environment cannot be loaded in a process."""
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
        self._control.settimeout(None)  # a late answer must not be mistaken for the next one

    def check(self) -> None:
        """RuntimeError if no more processes can be forked, which is not an error of a sample."""
        if (code := self._zygote.poll()) is not None:
            raise RuntimeError(f"the process that forks environments of {self._name} has ended with code {code}")

    def make(self, row: dict[str, Any], chat_template: str = "") -> EnvProcess:
        """An environment for a row, created by the first call in a new process. EnvProcessError if the fork fails."""
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
        """End all processes (idempotent); processes of closed environments get CLOSE_S seconds."""
        self._control.close()
        try:
            self._zygote.wait(2 * CLOSE_S)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.wait()


class EnvProcess:
    """An environment in another process, with the Env protocol. close() may be called in another thread than a waiting
    call, which then raises EnvProcessError."""

    def __init__(self, connection: socket.socket, pid: int, make: MakeEnv):
        self._connection, self._pid, self._make = connection, pid, make
        self._at_work, self._closed = False, False
        self.special_tokens = False  # from the environment after reset()

    def reset(self, seed: int) -> Any:
        """See Env."""
        self.special_tokens = bool(self._call(self._make))
        return self._call(ResetEnv(seed))

    def step(self, action: str) -> Any:
        """See Env."""
        return self._call(StepEnv(action))

    def expert_response(self, seed: int) -> Any:
        """See hpcrl.envs.environment.expert_response."""
        return self._call(AskExpert(seed))

    def busy_s(self) -> float:
        """Seconds in which the environment's process has computed or waited for a core."""
        return busy_s(str(self._pid))

    def close(self) -> None:
        """Call the environment's close(), then end its process with all child processes (idempotent); without close()
        if a call is running or the process has ended."""
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
        """The call's result. EnvProcessError if the call raises, or the process is gone."""
        self._at_work = True  # stays true if the process has ended: close() then kills its remaining children
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
    """CPU seconds of a process or thread, from its folder in /proc; 0 if it is gone."""
    try:
        user, system = Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def busy_s(task: str) -> float:
    """Seconds in which a process or thread has computed or waited for a core; 0 if it is gone."""
    try:
        computed, delayed, *_ = Path(f"/proc/{task}/schedstat").read_text().split()
    except (OSError, ValueError):  # a kernel without these statistics
        return computed_s(task)
    return (int(computed) + int(delayed)) / 1e9


def write(connection: socket.socket, body: bytes) -> None:
    """Send a message after its length."""
    connection.sendall(LENGTH.pack(len(body)) + body)


def read(connection: socket.socket, most_bytes: int | None = None) -> bytes:
    """Receive a message. EOFError if the other side has closed, ValueError if the message exceeds most_bytes."""
    count = LENGTH.unpack(_exactly(connection, LENGTH.size))[0]
    if most_bytes is not None and count > most_bytes:
        raise ValueError(f"{count} bytes, more than the limit of {most_bytes}")
    return _exactly(connection, count)


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        block = connection.recv(min(count - len(found), 1 << 20))
        if not block:
            raise EOFError("the connection was closed")
        found += block
    return bytes(found)
