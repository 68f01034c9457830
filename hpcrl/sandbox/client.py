"""The sandbox's client: starts the server, finds the highest level that works, and runs jobs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hpcrl.sandbox import probe, syscalls
from hpcrl.sandbox.jobs import ANSWER_S, ChildTask, JobOutcome, Limits, SandboxError, SandboxJob
from hpcrl.system.signals import held_back

START_S = 60.0
LEVELS = (3, 2, 1, 0)
BOOT = (
    "import sys; sys.path.insert(0, sys.argv[2]); from hpcrl.sandbox.server import main;"
    " sys.path.remove(sys.argv[2]); main()"
)
KEPT = ("LD_LIBRARY_PATH",)  # environment variables to keep: an interpreter from a module needs it
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class Sandbox:
    """A sandbox server and its isolation level. One job runs at a time."""

    def __init__(self, min_level: int = 1, limits: Limits | None = None, max_level: int = 3):
        """ValueError if no level from `min_level` on works here, with the reason for each level."""
        self.limits = limits or Limits()
        self.lacking: dict[int, str] = {}
        for level in LEVELS:
            if not min_level <= level <= max_level:
                continue
            if level and not syscalls.available():
                self.lacking[level] = f"no table of system calls for {os.uname().machine}"
                continue
            self.level = level
            problem = self._start() or (probe.problem(self.run) if level else "")
            if not problem:
                return
            self.close()
            self.lacking[level] = problem
        told = "; ".join(f"L{level}: {text}" for level, text in self.lacking.items())
        raise ValueError(
            f"no code sandbox of level L{min_level} or above works on {socket.gethostname()} ({told}). Use nodes with "
            "Linux 5.13 or later and Landlock, or with user namespaces; min_level=L0 runs the model's code with all "
            "your rights (docs/security.md)"
        )

    def _start(self) -> str:
        """Start the server; returns why it does not work."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {
            "level": self.level,
            "folder": tempfile.gettempdir(),
            "packages": list(dict.fromkeys(map(sysconfig.get_path, ("purelib", "platlib")))),
            "memory_bytes": self.limits.memory_bytes,
            "file_bytes": self.limits.file_bytes,
            "processes": self.limits.processes,
        }
        root = str(Path(__file__).parents[2])
        with theirs, held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-c", BOOT, json.dumps(settings), root],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**ENVIRONMENT, **{name: os.environ[name] for name in KEPT if name in os.environ}},
                start_new_session=True,  # lets it outlive its client's process group, to clean up
            )
        self._control.settimeout(START_S)
        try:
            answer = json.loads(self._control.recv(1 << 16) or '{"problem": "it ended at its start"}')
        except TimeoutError:
            return f"no start in {START_S:g} s"
        problem: str = answer.get("problem", "")
        if not problem and self.level in (1, 2) and not answer["landlock"]:
            problem = "the kernel has no Landlock"
        self.landlock: int = answer.get("landlock", 0)
        return problem

    def describe(self) -> str:
        """One line: the level, its protections, and why higher levels do not work."""
        parts = {3: "own mounts", 2: "own processes and network"}
        have = [text for level, text in parts.items() if self.level >= level]
        have += [f"Landlock {self.landlock}"] if self.landlock and self.level else []
        have += ["seccomp"] if self.level else []
        why = "".join(f"; no L{level}: {text}" for level, text in self.lacking.items())
        return f"code sandbox of level L{self.level} ({', '.join([*have, 'limits'])}){why}"

    def run(self, tasks: Sequence[ChildTask], timeout_s: float, keep_files: bool = False) -> JobOutcome:
        """Run tasks concurrently, with a channel between two, until the last has ended. With keep_files, they get the
        previous job's files, made executable. SandboxError if the sandbox failed; it is then restarted."""
        job = SandboxJob(tasks, self.limits.output_bytes)
        try:
            job.give(self._control, {"tasks": len(tasks), "keep_files": keep_files, "cpu_s": int(timeout_s) + 2})
            return job.wait(self._control, timeout_s)
        except OSError as error:
            self.close()
            if problem := self._start():
                raise SandboxError(f"the sandbox does not start again: {problem}") from error
            raise SandboxError(f"the sandbox has ended: {error}") from error
        finally:
            job.close()

    def close(self) -> None:
        """End the server and all its processes (idempotent)."""
        self._control.close()
        try:
            self._process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
