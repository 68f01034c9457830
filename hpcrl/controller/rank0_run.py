"""A run without roles: rank 0 does all the work (PipelineSpec.rank0_only)."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from pathlib import Path

from hpcrl.config import Config
from hpcrl.controller.guard import Stopped
from hpcrl.run_folder import check_owner

CHECK_OWNER_S = 10.0


class Rank0Run:
    """The argument of a rank0_only pipeline. `reason` is its result in one line; `resumes`: not the first attempt."""

    last_step = 0

    def __init__(self, config: Config, run_dir: Path, attempt: int, tell_agent: Callable[[], None]):
        """`tell_agent` signals progress to the node agent, which otherwise ends rank 0 as hanging."""
        self.config, self.run_dir, self.resumes, self.reason = config, run_dir, attempt > 1, ""
        self._attempt, self._tell_agent = attempt, tell_agent
        self._stop_signal, self._checked = 0, time.monotonic()

    def stop(self, signal_number: int) -> None:
        """End the work at its next report_progress() because of a signal; safe in a signal handler."""
        self._stop_signal = self._stop_signal or signal_number

    def report_progress(self) -> None:
        """Signal progress; called by any thread every few seconds. Raises Stopped if a signal has arrived,
        SupersededError if another attempt owns the run."""
        self._tell_agent()
        if self._stop_signal:
            name = signal.Signals(self._stop_signal).name
            raise Stopped(self._stop_signal, f"stopped by {name}; the next attempt continues from here")
        if time.monotonic() - self._checked > CHECK_OWNER_S:
            self._checked = time.monotonic()
            self.fence()

    def fence(self) -> None:
        """Called before results become visible. SupersededError if another attempt owns the run."""
        check_owner(self.run_dir, self._attempt)

    def finish(self) -> None:
        """Does nothing: the pipeline has done all the work."""

    def report(self) -> str:
        """The text for the user."""
        return self.reason

    def close(self, within_s: float = math.inf) -> str:
        """Does nothing: such a run has no trackers."""
        return ""
