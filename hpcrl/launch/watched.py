"""Whether a run has ended, seen from another process or machine."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from pathlib import Path

from hpcrl.commands.status import RunFolder, find_job, state
from hpcrl.system.cli import show

SETTLE_S = 65.0
"""Files that another machine wrote are visible after this time at the latest: NFS caches folders for 60 s."""
ENDED = ("finished", "stopped", "refused", "lost", "never started")
"""States (hpcrl.commands.status) in which no attempt runs or waits."""


@dataclass
class Watched:
    """A run that is looked at repeatedly.

    Args:
        lived: Whether an attempt ran or waited at an earlier look; then files of another machine may be late.
        aloud: Whether each new state is printed.
    """

    folder: Path
    lived: bool = False
    aloud: bool = False
    _ended_at: float | None = None
    _told: str = ""

    def ended(self) -> str:
        """The state in which the run has ended, in words; empty as long as an attempt runs, waits or may do so."""
        run = RunFolder(self.folder)
        text = state(run, find_job(run))
        word = text.partition(":")[0]
        if word not in ENDED:
            if text != self._told and (self.aloud or word in ("unknown", "held")):
                show(f"{self.folder} is {text}")
            self.lived, self._ended_at, self._told = True, None, text
            return ""
        now = time.monotonic()
        self._ended_at = now if self._ended_at is None else self._ended_at
        late = self.lived and run.owner.get("host") != platform.node()
        return text if not late or now - self._ended_at >= SETTLE_S else ""
