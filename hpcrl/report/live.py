"""Pages of the runs below a folder, made when they are asked for, also while the file system is slow."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hpcrl.metrics.log import METRICS
from hpcrl.metrics.metric_table import MetricsReader
from hpcrl.report.index import IndexEntry, entry, index
from hpcrl.report.page import page
from hpcrl.report.run_files import RunFiles, not_a_run
from hpcrl.run_folder import OWNERS

logger = logging.getLogger(__name__)

MAX_KEPT = 8
"""Pages that are kept."""
MAX_METRICS_BYTES = 1 << 28
"""Metrics that are kept in memory; those of one run are kept however many they are."""
MAX_AGE_S = 60.0
"""A kept page of an unchanged run folder is made again after this time: Slurm may have changed the run's state."""
MAX_WORK = 16
"""Pages and lists in work at once."""
MAX_RUNS = 500
LINE_SHARE = 0.25
"""Share of the deadline that the list waits for one run."""


class SlowError(TimeoutError):
    """A page is not ready in time; its making continues."""


@dataclass
class _Work:
    """One computation in its thread."""

    done: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    error: Exception | None = None


class DeadlineWork:
    """Computations in threads of their own, which a stuck file system may hold forever: a caller waits for a limited
    time, and callers with the same key wait for the same computation. The threads do not keep the process alive."""

    def __init__(self, most: int = MAX_WORK):
        self._most, self._lock = most, threading.Lock()
        self._running: dict[Hashable, _Work] = {}

    def get(self, key: Hashable, make: Callable[[], Any], within_s: float) -> Any:
        """The result of `make`, or its error. SlowError if it takes longer than `within_s`, or if too many computations
        are in work."""
        with self._lock:
            work = self._running.get(key)
            if work is None:
                if len(self._running) >= self._most:
                    raise SlowError(f"{len(self._running)} pages are in work")
                work = self._running[key] = _Work()
                threading.Thread(target=self._run, args=(key, work, make), daemon=True, name=f"page {key}").start()
        if not work.done.wait(within_s):
            raise SlowError(f"no answer within {within_s:g} s")
        if work.error is not None:
            raise work.error
        return work.value

    def _run(self, key: Hashable, work: _Work, make: Callable[[], Any]) -> None:
        try:
            work.value = make()
        except Exception as error:  # raised where the result is awaited
            work.error = error
        with self._lock:
            del self._running[key]
        work.done.set()


class LivePages:
    """The index and the reports of all runs below a folder. Reads only, and nothing outside of the folder.

    Args:
        root: The folder; runs are its subfolders and theirs.
        state_of: Returns a run's state in words; may ask Slurm.
        deadline_s: How long a request waits for a page.
        state_s: How long a page waits for the run's state.
    """

    def __init__(self, root: Path, state_of: Callable[[Path], str], deadline_s: float = 20.0, state_s: float = 3.0):
        self.root, self._state_of = root.resolve(), state_of
        self.deadline_s, self._state_s = deadline_s, state_s
        self._work, self._lines, self._states = DeadlineWork(), DeadlineWork(), DeadlineWork()
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[Any, float, str]] = OrderedDict()
        self._readers: OrderedDict[Path, MetricsReader] = OrderedDict()
        self._entries: dict[str, tuple[Any, float, IndexEntry]] = {}

    def index(self) -> str:
        """The list of runs, each with what was known of it in time."""
        ends = time.monotonic() + self.deadline_s
        names, left_out = self._work.get("runs", self._names, self.deadline_s)
        lines = []
        for name in names:
            try:
                within = min(max(ends - time.monotonic(), 0.05), self.deadline_s * LINE_SHARE)
                lines.append(self._lines.get(("line", name), partial(self._line, name), within))
            except SlowError:
                lines.append(IndexEntry(f"run/{name}", name, "the file system is slow"))
            except (OSError, ValueError) as error:
                lines.append(IndexEntry(f"run/{name}", name, f"cannot be read: {error}"))
        notes = [f"{left_out} more runs are not listed: serve a folder with fewer runs"] if left_out else []
        return index(f"Runs in {self.root}", lines, notes)

    def report(self, name: str) -> str:
        """A run's page. KeyError if there is no such run below the folder, SlowError if it is not ready in time."""
        return self._work.get(("page", name), partial(self._page, name), self.deadline_s)

    def _folder(self, name: str) -> Path:
        """The folder of a run by its name relative to the root. KeyError if it is none, or leads out of the root."""
        parts = name.split("/")
        if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise KeyError(name)
        folder = (self.root / name).resolve()
        if folder == self.root or not folder.is_relative_to(self.root) or not_a_run(folder):
            raise KeyError(name)
        return folder

    def _names(self) -> tuple[list[str], int]:
        """Names of runs relative to the root, and how many more there are."""
        found = []
        for folder in _folders(self.root):
            if self._is_run(folder):
                found.append(folder.name)
            elif folder.resolve().is_relative_to(self.root):
                found += [f"{folder.name}/{each.name}" for each in _folders(folder) if self._is_run(each)]
        return found[:MAX_RUNS], max(len(found) - MAX_RUNS, 0)

    def _is_run(self, folder: Path) -> bool:
        try:
            return folder.resolve().is_relative_to(self.root) and not not_a_run(folder)
        except (OSError, RuntimeError):  # RuntimeError: links in a circle
            return False

    def _line(self, name: str) -> IndexEntry:
        folder = self._folder(name)
        seen = _signature(folder)
        known = self._entries.get(name)
        if known is None or known[0] != seen or time.monotonic() - known[1] > MAX_AGE_S:
            line = entry(self._open(folder), f"run/{name}")
            known = self._entries[name] = (seen, time.monotonic(), line)
        return known[2]

    def _page(self, name: str) -> str:
        folder = self._folder(name)
        seen = _signature(folder)
        with self._lock:
            known = self._kept.get(name)
        if known is not None and known[0] == seen and time.monotonic() - known[1] < MAX_AGE_S:
            return known[2]
        text = page([self._open(folder, self._reader(folder))], index="../" * (name.count("/") + 1))
        self._drop_readers()
        with self._lock:
            self._kept[name] = (seen, time.monotonic(), text)
            self._kept.move_to_end(name)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return text

    def _reader(self, folder: Path) -> MetricsReader:
        """The reader of a run's metrics, which has read what earlier pages showed."""
        with self._lock:
            reader = self._readers.setdefault(folder, MetricsReader(folder / METRICS))
            self._readers.move_to_end(folder)
            return reader

    def _drop_readers(self) -> None:
        """Forget the metrics of runs whose page was not asked for recently."""
        with self._lock:
            used = sum(reader.table.num_bytes for reader in self._readers.values())
            while len(self._readers) > 1 and (used > MAX_METRICS_BYTES or len(self._readers) > MAX_KEPT):
                used -= self._readers.popitem(last=False)[1].table.num_bytes

    def _open(self, folder: Path, metrics: MetricsReader | None = None) -> RunFiles:
        try:
            state = self._states.get(folder, partial(self._state_of, folder), self._state_s)
        except SlowError:
            state = "unknown: Slurm did not answer in time"
        except Exception as error:  # the report is worth showing without it
            logger.debug("state of %s", folder, exc_info=True)
            state = f"unknown: {' '.join(str(error).split())}"
        return RunFiles(folder, state, inside=self.root, metrics=metrics)


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _signature(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes when the run writes: name, time and size of each entry of the folder, and of the owners' records."""
    found = []
    for place in (folder, folder / OWNERS):
        try:
            for path in sorted(place.iterdir()):
                seen = path.stat()
                found.append((str(path), seen.st_mtime_ns, seen.st_size))
        except OSError:
            continue  # a file vanished meanwhile, or may not be read: the page says so
    return tuple(found)
