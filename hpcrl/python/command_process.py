"""Runs a command of hpcrl in a process of its own, for a script or a notebook."""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from hpcrl.python.failure import RunFailed
from hpcrl.python.nesting import INSIDE
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.log import message_of

POLL_S = 0.2
READ_BYTES = 1 << 16
KEPT_LINES = 100


class CommandProcess:
    """`hpcrl COMMAND WORDS`, whose output is shown as it comes. Its standard error is held back until the checks are
    over, since the exception of a refused run has it."""

    def __init__(self, command: str, words: Sequence[str]):
        pipes = [os.pipe() for _ in range(3)]
        self._told, self._out, self._err = (reads for reads, _ in pipes)
        tells, out, err = (writes for _, writes in pipes)
        argv = [sys.executable, "-m", "hpcrl.python.child", str(tells), str(os.getpid()), command, *words]
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                # With the read ends, its last messages have a reader even if this process is killed.
                pass_fds=[tells, self._out, self._err],
                start_new_session=True,  # a terminal's Ctrl-C would reach it twice
                env={**os.environ, INSIDE: "1"},
            )
        except BaseException:
            self._close()
            raise
        finally:
            for writes in (tells, out, err):
                os.close(writes)
        self._decoders = {fd: codecs.getincrementaldecoder("utf-8")("replace") for fd in (self._out, self._err)}
        self._run_dir = b""
        self._checked = False
        self._errors = ""
        self._interrupted = False

    def wait(self) -> Path:
        """The run folder, when the command has ended; RunFailed, or KeyboardInterrupt if one has stopped the run."""
        try:
            self._read()
            code = self._process.wait()
        finally:
            if self._process.poll() is None:  # an error of this process, such as a closed standard output
                self._process.send_signal(signal.SIGTERM)
                self._process.wait()
            self._close()
        if code == ExitCode.DONE:
            return Path(os.fsdecode(self._run_dir))
        if self._interrupted:
            raise KeyboardInterrupt
        lines = [message_of(line) for line in self._errors.splitlines() if line.strip()]
        if code != ExitCode.BAD_INPUT:
            lines = lines[-1:]
        raise RunFailed(lines or [f"the run ended with code {code}"], code)

    def _close(self) -> None:
        for reads in (self._told, self._out, self._err):
            os.close(reads)

    def _read(self) -> None:
        """Show all output until the process has ended."""
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._out, self._err, self._told):
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                try:
                    ready = selector.select(POLL_S)
                    if not ready and self._process.poll() is not None:
                        return  # a process that outlives the run may keep its output open
                    for key, _ in ready:
                        if not self._take(key.fd):
                            selector.unregister(key.fd)
                except KeyboardInterrupt:
                    self._interrupted = True
                    with contextlib.suppress(ProcessLookupError):
                        self._process.send_signal(signal.SIGINT)

    def _take(self, descriptor: int) -> bool:
        """Read what has come; False at the end."""
        data = os.read(descriptor, READ_BYTES)
        if descriptor == self._told:
            self._run_dir += data
            if not data and self._run_dir and not self._checked:
                self._checked = True
                _write(sys.stderr, self._errors)
            return bool(data)
        text = self._decoders[descriptor].decode(data, final=not data)
        if descriptor == self._out:
            _write(sys.stdout, text)
        else:
            self._errors = "".join((self._errors + text).splitlines(keepends=True)[-KEPT_LINES:])
            if self._checked:
                _write(sys.stderr, text)
        return bool(data)


def _write(stream: TextIO, text: str) -> None:
    if text:
        stream.write(text)
        stream.flush()
