"""Prints a run's messages in order of time, from all ranks, agents and jobs, on all nodes, in all attempts.

    python -m hpcrl logs RUN                                everything; RUN is a folder, a name in runs/ or a job
    python -m hpcrl logs RUN --level warning --since 10m    what went wrong in the last ten minutes, on any node
    python -m hpcrl logs RUN --rank 0,3                     two ranks; also agent (all agents), launch (batch script)
    python -m hpcrl logs RUN --attempt 2 --since 2026-11-28T19:00
    python -m hpcrl logs RUN --lines 20 --follow            the last lines, then new ones until Ctrl-C

A message is `TIME HOST rank N LEVEL TEXT`. Times are UTC, by the host's clock. A line without this header, such as a
library's output or a crash, belongs to the previous message in its file. The order of a file's lines is kept.
"""

from __future__ import annotations

import heapq
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, NamedTuple

from hpcrl.commands.status import find_run
from hpcrl.config import ConfigError
from hpcrl.run_folder import LOGS, SLURM
from hpcrl.system import log
from hpcrl.system.cli import ArgumentParser, in_shell, use_utf8
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import allow_files

HEADER = re.compile(log.HEADER.pattern.encode())
FOLDER = re.compile(r"attempt_(\d+)")
NAME = re.compile(r"(rank|agent)_(\d+)\.log")
OPENED = re.compile(rb"attempt (\d+) in job ")
"""An attempt's first message in its job's log (hpcrl.launch.job)."""
LABEL = re.compile(rb"^ *\d+: (?=\d{4}-\d\d-\d\dT)")
"""Prefix of a line from srun --label."""
DURATION = re.compile(r"(\d+)([smhd])")
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
MAX_BYTES = 1 << 20
"""Maximum bytes of a line that are read at once, and the precision of --since's binary search in a file."""
CLOCKS_S = 60.0
"""Maximum lag of the file system's clock behind a node's."""
POLL_S = 0.5
OTHERS = {"agent", "launch"}
"""Writers of messages other than ranks."""


@dataclass(frozen=True)
class Wanted:
    """The messages to show. `ranks` and `since` are as in headers, all if empty; `level` is an index in LEVELS."""

    ranks: frozenset[str] = frozenset()
    level: int = 0
    since: str = ""
    attempt: int | None = None

    def of(self, attempt: int | None, who: str) -> bool:
        """Whether messages of this attempt and writer are wanted."""
        return self.attempt in (None, attempt) and (not self.ranks or who in self.ranks)


class Line(NamedTuple):
    """A line. `time` is its message's time, or a later time of an earlier line of the same file: times in a file never
    decrease."""

    time: str
    source: LogFile
    text: bytes
    is_header: bool


class LogFile:
    """A file of messages. `attempt` is None for a job's log, which covers all attempts and repeats the console messages
    of rank 0 and the agents."""

    def __init__(self, path: Path, who: str, attempt: int | None, wanted: Wanted):
        self.path, self.attempt = path, attempt
        self.is_copy = False  # whether the current message is a copy, see _without_copies
        self.who, self._wanted, self._attempt_now = who, wanted, attempt
        self._place, self._time, self._shown = 0, "", False

    def lines(self, to_end: bool) -> Iterator[Line]:
        """The wanted lines written since the last call; with `to_end` also an incomplete last line."""
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size <= self._place or _in_header(status.st_mtime + CLOCKS_S) < self._wanted.since:
                return
            if not self._place:
                self._place = self._skip(file, status.st_size)
                yield from self._begin_without_header(file, status.st_mtime, status.st_size)
            file.seek(self._place)
            while piece := file.readline(MAX_BYTES):
                is_whole = piece.endswith(b"\n") or len(piece) == MAX_BYTES
                if not (is_whole or to_end):
                    break
                self._place += len(piece)
                piece = LABEL.sub(b"", piece, count=1) if self.attempt is None else piece
                header = HEADER.match(piece)
                if header is not None:
                    at, who, level = (header[name].decode() for name in ("time", "who", "level"))
                    self._begin(at, who, level, piece[header.end() :])
                if self._shown:
                    yield Line(self._time, self, piece if is_whole else piece + b"\n", header is not None)

    def _begin(self, at: str, who: str, level: str, text: bytes) -> None:
        if self.attempt is None and who == "launch" and (opened := OPENED.match(text)):
            self._attempt_now = int(opened[1])
        wanted = self._wanted
        self._time = max(self._time, at)
        self._shown = (
            at >= wanted.since and log.LEVELS.index(level) >= wanted.level and wanted.of(self._attempt_now, who)
        )

    def _begin_without_header(self, file: BinaryIO, changed: float, size: int) -> Iterator[Line]:
        """Puts a header before lines that precede the first message: with that message's time, or else the file's time
        of last change."""
        file.seek(self._place)
        if not HEADER.match(file.readline(MAX_BYTES)):
            found = _first_header(file, self._place, size)
            at = found[1] if found is not None else _in_header(changed)
            self._begin(at, self.who, "INFO", b"")
            if self._shown:
                yield Line(
                    at, self, f"{at} - {self.who} INFO {self.path.name} begins without a header\n".encode(), True
                )

    def _skip(self, file: BinaryIO, size: int) -> int:
        """An offset before which no message is wanted, found by binary search."""
        low, high = 0, size if self._wanted.since and self.attempt is not None else 0
        while high - low > MAX_BYTES:
            middle = (low + high) // 2
            found = _first_header(file, middle, high)
            if found is not None and found[1] < self._wanted.since:
                low = found[0]
            else:
                high = middle
        return low


def _first_header(file: BinaryIO, start: int, end: int) -> tuple[int, str] | None:
    """Offset and time of the first message that begins in this range, which may begin within a message."""
    file.seek(start)
    if start:
        file.readline()
    while (place := file.tell()) < end and (line := file.readline(MAX_BYTES)):
        if header := HEADER.match(line):
            return place, header["time"].decode()
    return None


class RunLogs:
    """A run's log files, and how far each was read."""

    def __init__(self, run_dir: Path, wanted: Wanted):
        self._run_dir, self._wanted = run_dir, wanted
        self._files: dict[Path, LogFile] = {}
        self._find()

    def check(self) -> None:
        """ValueError if the run has no logs, or none of the wanted attempt or ranks."""
        if not self._files:
            raise ValueError(f"{self._run_dir} has no logs yet")
        attempts = {file.attempt for file in self._files.values() if file.attempt is not None}
        if self._wanted.attempt is not None and self._wanted.attempt not in attempts:
            known = f"there are {', '.join(map(str, sorted(attempts)))}" if attempts else "no attempt has logs yet"
            raise ValueError(f"--attempt {self._wanted.attempt}: no logs of this attempt; {known}")
        ranks = {file.who for file in self._files.values()} - OTHERS
        for who in sorted(self._wanted.ranks - OTHERS - ranks):
            last = f"the last one is {max(ranks, key=_number_of)}" if ranks else "no rank has a log yet"
            raise ValueError(f"--rank {_number_of(who)}: no log of this rank; {last}")

    def lines(self, to_end: bool = True) -> Iterator[Line]:
        """The lines since the last call, in order of time."""
        self._find()
        by_attempt: dict[int, list[LogFile]] = {}
        jobs = []
        for _, file in sorted(self._files.items()):
            if file.attempt is None:
                jobs.append(file.lines(to_end))
            elif self._wanted.of(file.attempt, file.who):
                by_attempt.setdefault(file.attempt, []).append(file)
        # An attempt begins after the previous one has ended, so only one attempt's files are open at a time.
        of_run = chain.from_iterable(_merged(file.lines(to_end) for file in by_attempt[n]) for n in sorted(by_attempt))
        return _without_copies(_merged([_ascending(of_run), *jobs]))

    def _find(self) -> None:
        for path in (self._run_dir / LOGS).glob("attempt_*/*.log"):
            attempt, found = FOLDER.fullmatch(path.parent.name), NAME.fullmatch(path.name)
            if attempt is not None and found is not None:
                who = "agent" if found[1] == "agent" else f"rank {int(found[2])}"
                self._files.setdefault(path, LogFile(path, who, int(attempt[1]), self._wanted))
        for path in (self._run_dir / SLURM).glob("job-*.log"):
            self._files.setdefault(path, LogFile(path, "launch", None, self._wanted))


def _number_of(rank: str) -> int:
    return int(rank.removeprefix("rank "))


def _merged(files: Iterable[Iterable[Line]]) -> Iterator[Line]:
    return heapq.merge(*files, key=attrgetter("time"))


def _ascending(lines: Iterable[Line]) -> Iterator[Line]:
    """The lines; a line older than the line before it gets that line's time, as within a file."""
    latest = ""
    for line in lines:
        latest = max(latest, line.time)
        yield line._replace(time=latest)


def _without_copies(lines: Iterable[Line]) -> Iterator[Line]:
    """Drops a message of a job's log if a rank's or agent's log has it with the same time; at equal times, the latter
    logs come first."""
    now, seen = "", set[bytes]()
    for line in lines:
        if line.time != now:
            now, seen = line.time, set()
        source = line.source
        if source.attempt is not None:
            if line.is_header:
                seen.add(line.text)
        elif line.is_header:
            source.is_copy = line.text in seen
        else:
            source.is_copy &= line.text.startswith(b"  ")
        if source.attempt is not None or not source.is_copy:
            yield line


def _in_header(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _since(word: str) -> str:
    """A duration or a time, as in headers. ValueError lists the accepted forms."""
    try:
        if found := DURATION.fullmatch(word):
            at = datetime.now(UTC) - timedelta(**{UNITS[found[2]]: int(found[1])})
        else:
            at = datetime.fromisoformat(word)
            at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"--since {word}: a duration (90s, 10m, 2h, 3d) or a time in UTC (2026-11-28T19:00)"
        ) from error
    return at.isoformat(timespec="milliseconds")


def _ranks(word: str) -> frozenset[str]:
    """Ranks as in headers. ValueError lists the accepted forms."""
    ranks = word.split(",")
    if not all(one.isdecimal() or one in OTHERS for one in ranks):
        raise ValueError(f"--rank {word}: ranks separated by commas (0,3), agent or launch")
    return frozenset(f"rank {int(one)}" if one.isdecimal() else one for one in ranks)


def _number(name: str, word: str) -> int:
    if not (word.isdecimal() and int(word) > 0):
        raise ValueError(f"{name} {word}: a number above 0")
    return int(word)


def _level(word: str) -> int:
    if word.upper() not in log.LEVELS:
        raise ValueError(f"--level {word}: one of {', '.join(log.LEVELS).lower()}")
    return log.LEVELS.index(word.upper())


def main(argv: Sequence[str] | None = None) -> int:
    """Print the messages; returns the exit code."""
    parser = ArgumentParser("hpcrl logs", __doc__)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--rank", metavar="N,N", help="only these ranks; agent: all agents, launch: the batch script")
    parser.add_argument("--level", metavar="LEVEL", help="minimum level: info, warning, error")
    parser.add_argument("--since", metavar="WHEN", help="only messages since 90s, 10m, 2h, 3d ago, or a time in UTC")
    parser.add_argument("--attempt", metavar="N", help="only this attempt")
    parser.add_argument("--lines", metavar="N", help="only the last N lines")
    parser.add_argument("--follow", action="store_true", help="wait for new messages, until Ctrl-C")
    try:
        arguments = parser.parse_args(argv)
        wanted = Wanted(
            ranks=_ranks(arguments.rank) if arguments.rank is not None else frozenset(),
            level=_level(arguments.level) if arguments.level is not None else 0,
            since=_since(arguments.since) if arguments.since is not None else "",
            attempt=_number("--attempt", arguments.attempt) if arguments.attempt is not None else None,
        )
        last = _number("--lines", arguments.lines) if arguments.lines is not None else None
        logs = RunLogs(find_run(arguments.run), wanted)
        logs.check()
    except (ConfigError, ValueError, OSError) as error:
        print(f"hpcrl: {' '.join(str(error).split())} ({in_shell('python -m hpcrl logs')} --help)", file=sys.stderr)
        return ExitCode.BAD_INPUT
    allow_files()
    try:
        _print(logs.lines(to_end=not arguments.follow), last)
        while arguments.follow:
            time.sleep(POLL_S)
            _print(logs.lines(to_end=False))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
    except OSError as error:
        print(f"hpcrl: {error}", file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


def _print(lines: Iterable[Line], last: int | None = None) -> None:
    for line in lines if last is None else deque(lines, last):
        sys.stdout.buffer.write(line.text)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    use_utf8()
    sys.exit(main(sys.argv[1:]))
