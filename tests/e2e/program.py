"""Start the whole program as a user would, watch it, kill it."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import psutil

MARK = "HPCRL_TEST_START"
"""Environment variable that every process of a start inherits; its value is unique."""


class Start:
    """One start of `python -m hpcrl.launch`; what it prints goes to files."""

    running: ClassVar[list[Start]] = []
    """Starts that a test which fails may leave to the next."""

    def __init__(self, run_dir: Path, arguments: list[str], environ: Mapping[str, str] | None = None):
        self.mark = uuid.uuid4().hex
        self.output = run_dir.with_name(f"{run_dir.name}.{self.mark[:8]}.out")
        self.errors = self.output.with_suffix(".err")
        with open(self.output, "wb") as output, open(self.errors, "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hpcrl.launch", f"run_dir={run_dir}", *arguments],
                env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self.mark, **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        self.running.append(self)

    @classmethod
    def kill_left(cls) -> None:
        """Kill the starts that have not ended."""
        while cls.running:
            if (start := cls.running.pop()).process.poll() is None:
                start.kill()

    @property
    def text(self) -> str:
        """Everything it has printed so far, errors last."""
        return self.output.read_text() + self.errors.read_text()

    @property
    def step(self) -> int:
        """The last step that the run reported, -1 before the first."""
        return max((int(number) for number in re.findall(r"\bstep (\d+)/", self.text)), default=-1)

    @property
    def ranks(self) -> dict[int, int]:
        """Rank -> process id of the ranks that run."""
        return {rank: process.pid for rank, process in by_rank(self._running()).items()}

    def wait(self, timeout_s: float = 200.0) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"no end within {timeout_s} s; it printed:\n{self.text}") from None

    def wait_until(self, happened: Callable[[], bool], timeout_s: float = 200.0) -> None:
        """Return when it happened or the program has ended."""
        deadline = time.monotonic() + timeout_s
        while not happened() and self.process.poll() is None:
            assert time.monotonic() < deadline, f"not within {timeout_s} s; it printed:\n{self.text}"
            time.sleep(0.01)

    def sleep(self, seconds: float) -> None:
        """Wait while the run works, until it ends at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def processes(self) -> list[psutil.Process]:
        """Launcher, ranks and whatever they have started that still runs, wherever it hangs in the process tree."""
        return [*self._running()]

    def processes_of(self, module: str) -> list[psutil.Process]:
        """The start's processes that run this module."""
        return [*self._running(module)]

    def _running(self, module: str = "") -> Iterator[psutil.Process]:
        """The start's processes that run this module, or all."""
        for process in psutil.process_iter():
            try:
                environ, words = process.environ(), process.cmdline()
                running = process.status() != psutil.STATUS_ZOMBIE
            except psutil.Error:  # ended meanwhile, or of another user
                continue
            if environ.get(MARK) == self.mark and running and (not module or module in words):
                yield process

    @contextlib.contextmanager
    def held(self, rank: int) -> Iterator[None]:
        """Inside, a rank is stopped; it continues afterwards unless it was killed."""
        process = psutil.Process(self.ranks[rank])
        process.suspend()
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def kill(self, rng: random.Random | None = None) -> None:
        """SIGKILL to every process, in random order."""
        while found := self.processes():
            (rng or random.Random(0)).shuffle(found)
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended with another process
                    process.kill()
        self.process.wait()

    def kill_launcher(self, within_s: float = 20.0) -> None:
        """SIGKILL only the launcher; asserts that everything else ends by itself."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + within_s
        while left := self.processes():
            assert time.monotonic() < deadline, f"{left} still run {within_s} s after their launcher was killed"
            time.sleep(0.05)


def by_rank(processes: Iterable[psutil.Process]) -> dict[int, psutil.Process]:
    """Rank -> its process: the oldest with its name, which a child shares until it runs another program."""
    found: dict[int, psutil.Process] = {}
    for process in sorted(processes, key=psutil.Process.create_time):
        if (rank := rank_of(process)) is not None:
            found.setdefault(rank, process)
    return found


def rank_of(process: psutil.Process) -> int | None:
    """The rank that a process is; its environment does not tell, for it is the one of the process that forked it."""
    try:
        name = re.fullmatch(r"hpcrl-rank-(\d+)", process.name())
    except psutil.Error:  # ended meanwhile
        return None
    return int(name[1]) if name else None
