"""The end of the job, and whether another step and its save fit before it."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping

from hpcrl.cluster import slurm

ASK_EVERY_S = 60.0  # the time limit may change while the job runs
ASK_S = 2.0  # timeout of the query, for which training waits; without an answer the last known end counts
RECENT = 5  # number of recent steps; the longest one counts
MARGIN = 1.2
SPARE_S = 5.0  # time for leaving the world and writing the outcome


class Deadline:
    """The end of this process's Slurm job, if any. `clock` returns seconds since the epoch, as Slurm's times are."""

    def __init__(self, environ: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.time):
        self._own, self._clock = slurm.own_job(environ), clock
        # From the batch script: a container may have no scontrol.
        self._end = float(environ.get("HPCRL_JOB_END") or 0) or math.inf
        self._asked = clock()
        self._steps: deque[float] = deque(maxlen=RECENT)

    def left_s(self) -> float:
        """Seconds until the job ends; inf if the job has no limit or the limit is unknown."""
        if self._own is not None and self._clock() - self._asked > ASK_EVERY_S:
            self._asked = self._clock()
            try:
                job = slurm.find_job(self._own[0], timeout_s=ASK_S)
            except slurm.SlurmError:
                job = None  # the last known end still counts
            self._end = job.end if job is not None and job.end is not None else self._end
        return self._end - self._clock()

    def record(self, step_s: float) -> None:
        """Record a step's duration, including evaluation."""
        self._steps.append(step_s)

    def needed_s(self, save_s: float) -> float:
        """Seconds that another step and a save of `save_s` need, estimated from the longest recent step."""
        return MARGIN * (max(self._steps, default=0.0) + save_s) + SPARE_S

    def notice(self, save_s: float, lead_s: float) -> str:
        """A text that states whether a signal `lead_s` before the job's end is early enough; empty outside Slurm, and
        until a step and a save have been measured."""
        if self._own is None or not self._steps or not save_s:
            return ""
        rates = f"a step takes up to {max(self._steps):.1f} s and a save {save_s:.1f} s"
        if self.needed_s(save_s) <= lead_s:
            return f"{rates}: with {lead_s:g} s of notice (cluster.signal_lead_s) no step is lost"
        short = f"{lead_s:g} s of notice (cluster.signal_lead_s) may be too short"
        return f"{rates}: {short}, and steps after the last checkpoint be lost"

    def is_near(self, save_s: float) -> bool:
        """Whether the job would end before another step is trained and saved."""
        return self.left_s() < self.needed_s(save_s)
