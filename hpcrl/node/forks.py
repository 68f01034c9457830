"""Forks a node's ranks from one process that has imported their modules: a node then reads and executes thousands of
Python files once instead of once per rank.

    agent   starts the parent, sends it the ranks to fork, gets their process ids, waits for its end, starts the ranks
    parent  imports, forks the ranks and exits, so the kernel makes the agent, a subreaper meanwhile, their parent
    rank    waits for a byte from the agent; exits if the agent has ended or aborted

Forking is safe only from a process with one thread and no open GPU; otherwise the agent starts every rank as a program.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from hpcrl.node.devices import VISIBLE
from hpcrl.system.signals import STOPPING, die_with, held_back

logger = logging.getLogger(__name__)

FORKS = "HPCRL_FORKS"
"""Environment variable of the parent: its end of the socket to the agent."""
PR_SET_CHILD_SUBREAPER = 36
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/infiniband", "/dev/cxi", "/dev/hfi")
POLL_S = 0.02
LIMIT_BYTES = 1 << 24


class RankStart(msgspec.Struct):
    """Settings that differ between a node's ranks. `environ` has variables, `log` is the file for standard error and,
    if `quiet`, standard output, and `inherited` are file descriptors that the rank keeps."""

    rank: int
    environ: dict[str, str]
    log: str
    quiet: bool
    inherited: list[int]


class Order(msgspec.Struct):
    """The ranks to fork, and the process that becomes their parent."""

    agent: int
    starts: list[RankStart]


class AdoptedProcess:
    """A process that this process can wait for but has not started; has the methods of Popen that agents use."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal. subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif deadline is not None and time.monotonic() > deadline:
                assert timeout is not None
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            else:
                time.sleep(POLL_S)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process was reaped."""
        if self.returncode is None:
            os.kill(self.pid, number)


# -- the agent's side


def fork_ranks(
    argv: Sequence[str], environ: Mapping[str, str], starts: Sequence[RankStart], report_progress: Callable[[], bool]
) -> dict[int, AdoptedProcess]:
    """Fork the ranks from the program `argv` and return their processes; none if forking failed, with the reason in the
    first rank's log. `report_progress` is polled meanwhile; it returns False to abort the start. Call this on the main
    thread: Linux ties die_with() to the thread that starts a process."""
    ours, theirs = socket.socketpair()
    with ours, _as_subreaper():
        with held_back(), theirs, open(starts[0].log, "ab") as log:
            parent = subprocess.Popen(
                list(argv),
                env={**environ, FORKS: str(theirs.fileno())},
                pass_fds=[theirs.fileno(), *(one for start in starts for one in start.inherited)],
                stdin=subprocess.DEVNULL,
                stderr=log,
                preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - no thread runs yet that could hold a lock
            )
        answer = b""
        try:
            ours.sendall(msgspec.json.encode(Order(os.getpid(), list(starts))) + b"\n")
            ours.settimeout(POLL_S)
            while report_progress() and not answer.endswith(b"\n") and len(answer) < LIMIT_BYTES:
                with contextlib.suppress(TimeoutError):
                    if not (block := ours.recv(1 << 16)):
                        break
                    answer += block
        except OSError:  # the parent has ended
            pass
        finally:
            if not answer.endswith(b"\n"):
                parent.kill()
            parent.wait()
        if not answer.endswith(b"\n"):
            return {}
        pids = msgspec.json.decode(answer, type=dict[int, int])
        with contextlib.suppress(OSError):  # no process reads: none was forked, or all were killed
            ours.sendall(bytes(len(pids)))
        return {rank: AdoptedProcess(pid) for rank, pid in pids.items()}


@contextlib.contextmanager
def _as_subreaper() -> Iterator[None]:
    """Inside, this process becomes the parent of orphaned descendants."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# -- the parent's side


class Parent:
    """The process that forks. Until then its output goes to the log of its standard error."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=int(os.environ.pop(FORKS)))
        self._stdout = os.dup(1)
        os.dup2(2, 1)
        order = b""
        while not order.endswith(b"\n"):
            if not (block := self._socket.recv(1 << 16)):
                os._exit(1)  # the agent has ended
            order += block
        self._order = msgspec.json.decode(order, type=Order)

    @property
    def gpus(self) -> dict[int, str]:
        """Rank -> its CUDA_VISIBLE_DEVICES, for the ranks to fork."""
        return {start.rank: start.environ[VISIBLE] for start in self._order.starts}

    def fork(self) -> None:
        """Returns in each forked process; the parent exits."""
        sys.stdout.flush()
        pids = {}
        if problem := unsafe():
            logger.warning("every rank imports by itself: the process to fork has %s", problem)
        else:
            for start in self._order.starts:
                pid = os.fork()
                if not pid:
                    return self._begin(start)
                pids[start.rank] = pid
        self._socket.sendall(msgspec.json.encode(pids) + b"\n")
        os._exit(0)

    def _begin(self, start: RankStart) -> None:
        os.setsid()
        log = os.open(start.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(log, 2)
        os.dup2(log if start.quiet else self._stdout, 1)
        os.close(log)
        os.close(self._stdout)
        os.environ.update(start.environ)
        for other in self._order.starts:
            for descriptor in set(other.inherited) - set(start.inherited):
                os.close(descriptor)
        if not self._socket.recv(1):
            os._exit(1)  # the agent has ended or aborted
        self._socket.close()
        die_with(self._order.agent)
        if not start.quiet:  # rank 0, whose start holds no signals back
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def unsafe() -> str:
    """Why this process must not be forked; empty if it may be."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"{threads} threads"
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(entry).startswith(DEVICES):
                return f"{os.readlink(entry)} open"
    return ""
