"""hpcrl's messages, through Python's logging: with time, host, rank and level in a run's logs, plain for a user.

    2026-11-28T19:00:01.123+00:00 node01 rank 3 WARNING text       in a file; times are UTC
    hpcrl: text                                                    on a terminal

WHO is `rank N`, `agent` (of a node) or `launch` (of a batch script). Further lines of a record are indented; a line
without a header, from a library or a crash, belongs to the previous record. `hpcrl logs` merges the files.

Levels: INFO, progress; WARNING, a loss or an anomaly that the run survives; ERROR, the end of a run or a rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from hpcrl.system.files import is_storage_error

OURS = "hpcrl"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
HEADER = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00) (?P<host>\S+) (?P<who>rank \d+|agent|launch) "
    rf"(?P<level>{'|'.join(LEVELS)}) "
)
STDERR = Path("/dev/stderr")
"""Log file of a process whose standard error is already a log."""
IN_JOB = "HPCRL_JOB_END"
"""Environment variable set by hpcrl.launch's batch scripts: standard output and error are the job's log."""
BARE = {"console": "bare"}
"""`extra` of a record that the console shows without a prefix: progress, the final report."""
UNSHOWN = {"console": "none"}
"""`extra` of a record that goes only to files."""


def start(who: str, *, file: Path | None = None, console: Literal["stdout", "stderr"] | None = None) -> None:
    """Send this process's messages to a file (including libraries' messages) and to the console (only hpcrl's);
    replaces an earlier call. `who` is as above; `file` is STDERR, or a path, whose folder the first message creates.

    In a job, the console is the job's log and gets headers. If `file` is STDERR, the console gets no errors, since the
    agent shows them in one line at the end of the run.
    """
    stop()
    root, ours, header = logging.getLogger(), logging.getLogger(OURS), _Header(who)
    ours.setLevel(logging.INFO)
    if file is not None:
        root.addHandler(_Lines(header, _write_to_stderr if file == STDERR else lambda text: _append(file, text)))
        sys.excepthook, threading.excepthook = _uncaught, _uncaught_in_thread
        logging.captureWarnings(file == STDERR)
    if console is not None:
        shown = _Lines(header if IN_JOB in os.environ or who == "launch" else _ForUser(who), _writer_to(console))
        shown.addFilter(logging.Filter(OURS))
        shown.addFilter(lambda record: getattr(record, "console", "") != "none")
        if file == STDERR:
            shown.addFilter(lambda record: record.levelno < logging.ERROR)
        # Without a file, libraries' messages are left unchanged.
        (ours if file is None else root).addHandler(shown)


def start_child() -> None:
    """start() in a process that a rank has started."""
    if (rank := os.environ.get("HPCRL_RANK")) is not None:  # set by an agent: standard error is a log
        start(f"rank {rank}", file=STDERR)
    else:
        start("", console="stderr")


def stop() -> None:
    """Undo start()."""
    for logger in (logging.getLogger(), logging.getLogger(OURS)):
        for handler in [handler for handler in logger.handlers if isinstance(handler, _Lines)]:
            logger.removeHandler(handler)
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    logging.captureWarnings(False)


def adopt_libraries() -> None:
    """Set this process's log format on handlers that libraries have attached to their own loggers, if these write to
    the log. Call it after the imports."""
    header = next((handler.formatter for handler in logging.getLogger().handlers if isinstance(handler, _Lines)), None)
    for name in list(logging.root.manager.loggerDict) if isinstance(header, _Header) else ():
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and _is_stderr(handler):
                handler.setFormatter(header)


def message_of(line: str) -> str:
    """The text of a line without its header or prefix."""
    found = HEADER.match(line)
    return line[found.end() :] if found else line.removeprefix("hpcrl: ")


class _Header(logging.Formatter):
    def __init__(self, who: str):
        super().__init__()
        self._start = f"{os.environ.get('SLURMD_NODENAME') or platform.node().split('.')[0]} {who}"

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        level = LEVELS[min(max(record.levelno // 10 - 1, 0), len(LEVELS) - 1)]
        whose = "" if record.name.partition(".")[0] == OURS else f"{record.name}: "
        text = f"{whose}{_with_traces(self, record)}".strip("\n").replace("\n", "\n  ")
        return f"{time} {self._start} {level} {text}"


class _ForUser(logging.Formatter):
    def __init__(self, who: str):
        super().__init__()
        self._prefix = f"hpcrl {who}: " if who.startswith("rank ") and who != "rank 0" else "hpcrl: "

    def format(self, record: logging.LogRecord) -> str:
        return f"{'' if getattr(record, 'console', '') == 'bare' else self._prefix}{_with_traces(self, record)}"


class _Lines(logging.Handler):
    """Formats records and writes them as text; a full disk costs the record, not the run."""

    def __init__(self, formatter: logging.Formatter, write: Callable[[str], None]):
        super().__init__()
        self.setFormatter(formatter)
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record. BrokenPipeError if the output no longer has a reader."""
        try:
            self._write(f"{self.format(record)}\n")
        except OSError as error:
            if not is_storage_error(error):
                raise
        except Exception:
            self.handleError(record)


def _with_traces(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [record.getMessage()]
    parts += [formatter.formatException(record.exc_info)] if record.exc_info and record.exc_info[0] else []
    parts += [record.stack_info] if record.stack_info else []
    return "\n".join(parts)


def _writer_to(name: Literal["stdout", "stderr"]) -> Callable[[str], None]:
    def write(text: str) -> None:
        stream = getattr(sys, name)  # looked up each time: a progress bar replaces it for a while
        stream.write(text)
        stream.flush()

    return write


def _write_to_stderr(text: str) -> None:
    if (stream := sys.__stderr__) is not None:  # not sys.stderr, which a progress bar redirects to the terminal
        stream.write(text)
        stream.flush()


def _append(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):  # the console shows it, too
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", buffering=0) as file:
            file.write(text.encode(errors="backslashreplace"))


def _is_stderr(handler: logging.StreamHandler[Any]) -> bool:
    with contextlib.suppress(OSError, AttributeError, ValueError):  # no file, or closed
        return os.path.sameopenfile(handler.stream.fileno(), 2)
    return False


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        logging.getLogger(OURS).critical("ended by %s", kind.__name__, exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
        name = args.thread.name if args.thread is not None else "?"
        found = (args.exc_type, args.exc_value, args.exc_traceback)
        logging.getLogger(OURS).error("thread %s ended by %s", name, args.exc_type.__name__, exc_info=found)
