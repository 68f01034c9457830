"""Logs to each tracker in its own thread, so a tracker that fails or hangs costs only a warning.

A file next to a tracker's folder holds the last step that was logged to it. The next attempt continues after this step:
it logs the rows of metrics.jsonl that the tracker missed, and skips the steps from the checkpoint to the previous
attempt's end, which the tracker has. A tracker that can rewind (TrackerSpec.rewinds) gets these steps again; one with
present values only (TrackerSpec.live) gets the steps after the checkpoint.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.metrics.trackers.tracker import Tracker
from hpcrl.system.files import write_durably

logger = logging.getLogger(__name__)

FOLDER = "trackers"
MAX_WAITING = 10_000
"""Maximum queued calls of a slow tracker."""

TrackerCall = Callable[[Tracker], object]


class TrackerThread:
    """One tracker's thread. `warn` is called at most once, from any thread, with the reason why the tracker ended."""

    def __init__(
        self, name: str, make: Callable[[int], Tracker], step_file: Path, resume_step: int, rewinds: bool,
        timeout_s: float, warn: Callable[[str], None] = logger.warning, live: bool = False,
    ):  # fmt: skip
        """`make` is called with the first step that will be logged; `step_file` has the last logged step. `rewinds`
        and `live`: see TrackerSpec."""
        self.name, self._timeout_s, self._warn, self._path = name, timeout_s, warn, step_file
        self.last_step = _read(step_file)
        if rewinds or live:
            self.last_step = resume_step if live else min(self.last_step, resume_step)
        first = self.last_step + 1
        self._calls: queue.Queue[TrackerCall | None] = queue.Queue()
        self._most = MAX_WAITING
        self._lock = threading.Lock()
        self._since: float | None = time.monotonic()
        self._ended, self._finishing, self._hint = False, False, ""
        self._thread = threading.Thread(target=self._run, args=(lambda: make(first),), name=f"tracker {name}")
        self._thread.daemon = True
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue a step, unless the tracker has it."""
        if step <= self.last_step:
            return
        self.last_step = step

        def call(tracker: Tracker) -> None:
            tracker.log(step, metrics)
            write_durably(self._path, str(step).encode())

        self.put(call)

    def put(self, call: TrackerCall) -> None:
        """Queue a call. Returns at once; ends the tracker if the previous call is overdue."""
        self._check()
        if self._ended:
            return
        if self._calls.qsize() >= self._most:
            self._end(f"is {self._most} calls behind")
        else:
            self._calls.put(call)

    def expect(self, num_calls: int) -> None:
        """Allow this many more queued calls, which log earlier steps."""
        self._most += num_calls

    def drain(self) -> None:
        """Wait until nothing is queued, or the tracker has ended at an overdue call."""
        while self._calls.qsize() and not self._ended:
            self._check()
            time.sleep(0.02)

    def finish(self) -> None:
        """Queue the tracker's end, for which close() waits."""
        if not self._finishing:
            self._finishing = True
            self.put(self._close)
            self._calls.put(None)

    def close(self, within_s: float) -> str:
        """End the tracker after its queued calls, within this many seconds; returns its upload command."""
        self.finish()
        if not self._ended:
            self._thread.join(min(within_s, self._timeout_s))
            if self._thread.is_alive():
                self._end(f"did not end within {min(within_s, self._timeout_s):.3g} s")
        return self._hint

    def _close(self, tracker: Tracker) -> None:
        self._hint = tracker.close()

    def _check(self) -> None:
        since = self._since
        if since is not None and time.monotonic() - since > self._timeout_s:
            self._end(f"did not answer within tracking.timeout_s={self._timeout_s:g}")

    def _run(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
            self._since = None
            while (call := self._calls.get()) is not None and not self._ended:
                self._since = time.monotonic()
                call(tracker)
                self._since = None
        except BaseException as error:  # third-party code, which may also call sys.exit()
            self._end(f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def _end(self, why: str) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._warn(f"the tracker {self.name} {why}; the run continues without it, metrics.jsonl has every step")


def run_id(run_dir: Path) -> str:
    """The run's id for all trackers and attempts, created by the first attempt."""
    path = run_dir / FOLDER / "run_id"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, secrets.token_hex(4).encode())
    return path.read_text().strip()


def log_missed(trackers: Sequence[TrackerThread], rows: Sequence[Mapping[str, Any]]) -> None:
    """Log to each tracker the rows of metrics.jsonl that it lacks."""
    for tracker in trackers:
        tracker.expect(len(rows))
        for row in rows:
            tracker.log(
                row["step"], {name: value for name, value in row.items() if name != "step" and value is not None}
            )


def _read(step_file: Path) -> int:
    """The last step that was logged; -1 without a readable file."""
    try:
        return int(step_file.read_text())
    except (OSError, ValueError):
        return -1
