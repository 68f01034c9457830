"""A user's environment and reward that go wrong, run by the ranks of tests/e2e/test_faults.py."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


class RoughEnv:
    """Two turns; from the `after`-th step of rank `rank` on (any rank: -1) it does what `how` says (sleep: once)."""

    num_steps = 0

    def __init__(self, answer: Any = "", how: str = "", after: int = 0, rank: int = -1):
        self._goes_wrong = rank in (-1, int(os.environ["HPCRL_RANK"]))
        self._how, self._after, self._turn = how, after, 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        RoughEnv.num_steps += 1
        if self._goes_wrong and RoughEnv.num_steps > self._after:
            if self._how == "sleep" and RoughEnv.num_steps == self._after + 1:
                time.sleep(3600)
            elif self._how == "exit":
                os._exit(0)
            elif self._how == "sys.exit":
                raise SystemExit(0)
        self._turn += 1
        return ("again", 0.0, False, False, {}) if self._turn == 1 else ("", float(len(action)), True, False, {})


def rough_reward(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, folder: str = ""
) -> float:
    """The first response of the run hangs, the second kills its process, the third is worth NaN; others are scored."""
    for name in ("hang", "kill", "nan"):
        try:
            (Path(folder) / name).touch(exist_ok=False)
        except FileExistsError:
            continue
        if name == "hang":
            time.sleep(3600)
        elif name == "kill":
            os.abort()
        return float("nan")
    return float(solution_str == ground_truth)


def huge_reward(data_source: str, solution_str: str, ground_truth: str) -> float:
    """Finite, but not the sum of a group."""
    return 3e38
