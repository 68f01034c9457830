"""A user's reward that takes time or fails as files in a test's folder say."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from hpcrl.rewards.reward import RewardItem
from hpcrl.system.files import committed_step

_first_commit: int | None = None


def reward(items: Sequence[RewardItem], folder: str) -> list[float]:
    """Like exact_match, called with a step's responses. Files: `pace`, the seconds that it takes; `commits`, 0 or 1:
    its rank is killed once the run has committed so many checkpoints since the first call."""
    global _first_commit  # noqa: PLW0603 - counts over all calls
    committed = committed_step(Path(folder) / "run")
    _first_commit = committed if _first_commit is None else _first_commit
    if (Path(folder) / "commits").exists() and (committed > _first_commit) >= read(folder, "commits"):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    time.sleep(read(folder, "pace"))
    return [float(item.response == item.answer) for item in items]


def read(folder: str, name: str) -> float:
    """The number in a file, 0 without one."""
    path = Path(folder) / name
    return float(path.read_text() or 0) if path.exists() else 0.0
