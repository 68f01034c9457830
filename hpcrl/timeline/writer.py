"""Writes timelines in a thread of rank 0, so the run never waits for it. The run goes on without a step's timeline if
it cannot be written, or if two earlier ones are still to be written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Full, Queue

from hpcrl.system.files import write_durably
from hpcrl.timeline.recorder import RecordedStep
from hpcrl.timeline.step_file import encode, path_of, prune

logger = logging.getLogger(__name__)

WAITING_STEPS = 2


class TimelineWriter:
    """Writes the files of steps, and removes old ones."""

    def __init__(self, run_dir: Path, keep_steps: int, fence: Callable[[], None]):
        """`fence` raises if another attempt owns the run; then nothing is written."""
        self._run_dir, self._keep_steps, self._fence = run_dir, keep_steps, fence
        self._steps: Queue[RecordedStep | None] = Queue(WAITING_STEPS)
        self._told = False
        self._thread = threading.Thread(target=self._write_forever, name="timeline", daemon=True)
        self._thread.start()

    def put(self, step: RecordedStep) -> None:
        """Have a step written; returns at once."""
        try:
            self._steps.put_nowait(step)
        except Full:
            self._tell(f"the timeline of step {step.step} is left out: earlier ones are still being written")

    def close(self, within_s: float) -> None:
        """Wait until everything is written, at most this many seconds."""
        try:
            self._steps.put(None, timeout=within_s)
        except Full:
            return
        self._thread.join(within_s)

    def _write_forever(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                self._write(step)
            except Exception as error:  # the run's result does not need it
                self._tell(f"the timeline of step {step.step} is left out: {type(error).__name__}: {error}")

    def _write(self, step: RecordedStep) -> None:
        data = encode(step.converted())
        self._fence()
        path = path_of(self._run_dir, step.step)
        path.parent.mkdir(exist_ok=True)
        write_durably(path, data)
        prune(self._run_dir, self._keep_steps)
        if step.omitted:
            self._tell(f"step {step.step} has more events than a timeline holds: {step.omitted.total()} are left out")

    def _tell(self, problem: str) -> None:
        if not self._told:
            self._told = True
            logger.warning("%s (further ones are not reported)", problem)
