"""A reward and an environment of a user that take their time or go wrong when a file of a test's folder says so."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrl.rewards.base import RewardItem

_num_calls = 0


def reward(items: Sequence[RewardItem], folder: str) -> list[float]:
    """As exact_match, a step's responses at a time. pace: seconds it takes; die_at: the call, counted in this process,
    that kills its rank."""
    global _num_calls  # noqa: PLW0603 - counts over all calls
    _num_calls += 1
    if read(folder, "die_at") == _num_calls:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    time.sleep(read(folder, "pace"))
    return [float(item.response == item.answer) for item in items]


def read(folder: str, name: str) -> float:
    """The number in a file, 0 without one."""
    path = Path(folder) / name
    return float(path.read_text() or 0) if path.exists() else 0.0


class SleepyEnv:
    """One turn; the first to find the file `sleep` removes it and sleeps for ever."""

    def __init__(self, answer: Any = "", folder: str = ""):
        self._answer, self._sleep = answer, Path(folder) / "sleep"

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        try:
            self._sleep.unlink()
        except FileNotFoundError:
            return "", float(action == self._answer), True, False, {}
        time.sleep(3600)
        raise AssertionError("woke up")
