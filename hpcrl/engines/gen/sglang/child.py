"""Run a Server in a separate process.

SGLang replaces its process's signal handlers and event loop, and kills all of the process's children when one of its
own processes fails. So a rank runs SGLang in a child process. If the child dies or hangs, the rank's error names SGLang
and the current call.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hpcrl.system.signals import die_with, held_back

PR_SET_PTRACER = 0x59616D61
LAST_LINES = 12
TRACEBACK = "Traceback (most recent call last):"
STARTING = "starting"
END_S = 30.0


class Child:
    """A Server in a child process, whose calls have a deadline.

    Args:
        arguments: Arguments of SGLang's ServerArgs.
        environment: Environment variables of the child process.
        start_s: Deadline of the start in seconds.
        call_s: Deadline of a call in seconds.

    ValueError if SGLang refuses the arguments. RuntimeError or TimeoutError if it fails, dies or does not answer, with
    its last error and the log lines before it.
    """

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str], start_s: float, call_s: float):
        self._call_s = call_s
        self._log = tempfile.NamedTemporaryFile(prefix="sglang-", suffix=".log")  # noqa: SIM115
        context = multiprocessing.get_context("spawn")
        self._channel, theirs = context.Pipe()
        about = theirs, dict(arguments), dict(environment), self._log.name, os.getpid()
        self._process = context.Process(target=_serve, args=about)
        with held_back():  # the child blocks stop signals, which a batch system sends to the whole step
            self._process.start()
        # The child opens this process's GPU memory with pidfd_getfd, which Yama's ptrace_scope=1 would forbid.
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, self._process.pid)
        theirs.close()
        try:
            self._answer(STARTING, start_s)
        except BaseException:
            self.close()
            raise

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the Server's method `name` and return its result."""
        try:
            self._channel.send((name, arguments))
        except OSError:
            raise self._dead(name) from None
        return self._answer(name, self._call_s)

    def close(self) -> None:
        """End the process, within a deadline."""
        with contextlib.suppress(OSError):  # it is dead
            self._channel.send(("close", ()))
            self._process.join(END_S)
        self._process.kill()
        self._process.join()
        self._channel.close()
        self._log.close()

    def _answer(self, during: str, timeout_s: float) -> Any:
        if not self._channel.poll(timeout_s):
            self._process.kill()
            raise TimeoutError(
                f"SGLang (pid {self._process.pid}, {during}) gave no answer for {timeout_s:g} s{self._last()}"
            )
        try:
            error, value = self._channel.recv()
        except (EOFError, OSError):
            raise self._dead(during) from None
        if error:
            if during == STARTING and error in ("TypeError", "ValueError"):
                raise ValueError(value)
            raise RuntimeError(f"SGLang ({during}): {error}: {value}{self._last()}")
        return value

    def _dead(self, during: str) -> RuntimeError:
        self._process.join(END_S)
        code = self._process.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
        return RuntimeError(f"SGLang (pid {self._process.pid}, {during}) {how}{self._last()}")

    def _last(self) -> str:
        lines = Path(self._log.name).read_text(errors="replace").splitlines()
        error, lines = last_error(lines)
        if not lines:
            return "; its log is empty"
        return "".join([f": {error}" if error else "", "; its last lines:\n  ", "\n  ".join(lines[-LAST_LINES:])])


def last_error(lines: list[str]) -> tuple[str, list[str]]:
    """The last exception with a traceback in a program's output, and the lines up to it; without one, "" and all lines.
    When a scheduler fails, SGLang kills its processes with SIGKILL, and other packages' warnings follow the cause."""
    begins = [number for number, line in enumerate(lines) if TRACEBACK in line]
    for number in range(begins[-1] + 1, len(lines)) if begins else ():
        if lines[number].strip() and not lines[number][0].isspace():
            return lines[number], lines[: number + 1]
    return "", lines


def _serve(channel: Connection, arguments: dict[str, Any], environment: dict[str, str], log: str, parent: int) -> None:
    die_with(parent)
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    from hpcrl.engines.gen.sglang.server import Server

    server: Server | None = None
    name: str = ""
    while name != "close":
        try:
            if server is None:
                server, value = Server(arguments), None
            else:
                name, given = channel.recv()
                value = server.call(name, *given)
        except EOFError:  # the rank ended
            return
        except Exception as error:
            channel.send((type(error).__name__, str(error)))
        else:
            channel.send(("", value))
        if server is None:
            return
