"""A user's failing environment and reward, run by the ranks of tests/e2e/test_faults.py."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrl.algorithms.spec import POLICY_GRADIENT
from hpcrl.rewards.reward import RewardItem, Score
from hpcrl.spec.kinds import AlgorithmSpec
from hpcrl.spec.policy_loss import PolicyLoss


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


class FallingEnv:
    """Two turns. In the second, the first episode of a run raises, and the next one that gets there waits to be killed:
    its rank and the process that forked its own stand in `folder`/waits."""

    def __init__(self, folder: str):
        self._folder, self._turn = Path(folder), 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turn += 1
        if self._turn == 1:
            return "again", 0.0, False, False, {}
        if claimed(self._folder / "raises"):
            raise KeyError("the first episode")
        if claimed(self._folder / "sleeps"):
            (self._folder / "part").write_text(f"{os.environ['HPCRL_RANK']} {os.getppid()}")
            (self._folder / "part").rename(self._folder / "waits")
            time.sleep(3600)
        return "", float(len(action)), True, False, {}


def claimed(path: Path) -> bool:
    """Whether this is the first call of a run with this path."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def rough_reward(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, folder: str = ""
) -> float:
    """The first response of the run hangs, the second kills its process, the third is worth NaN; others are scored."""
    for name in ("hang", "kill", "nan"):
        if not claimed(Path(folder) / name):
            continue
        if name == "hang":
            time.sleep(3600)
        elif name == "kill":
            os.abort()
        return float("nan")
    return float(solution_str == ground_truth)


def talking_reward(data_source: str, solution_str: str, ground_truth: str) -> float:
    """Prints and logs what it does."""
    logging.getLogger("a_lab.rewards").warning("scores a response")
    print("printed by a reward", flush=True)
    return float(solution_str == ground_truth)


def huge_reward(data_source: str, solution_str: str, ground_truth: str) -> float:
    """Allowed, but the gradient's norm is not finite then."""
    return 1e30


def rank_siblings(items: Sequence[RewardItem]) -> list[Score]:
    """A last turn earns the share of other members' last turns that sort before it, and an eighth each earlier turn or,
    of a single turn, its first token. A validation prompt has no group. Refuses anything but one whole group of
    four."""
    texts = [item.response for item in items]
    if len({(item.sample_id >> 24, item.prompt) for item in items}) != 1 or len(items) not in (1, 4):
        raise ValueError(f"no group: {[item.sample_id for item in items]}")
    scores = []
    for item in items:
        share, metrics = sum(text < item.response for text in texts) / 4, {"scorer": float(os.environ["HPCRL_RANK"])}
        if item.earlier:
            turns = [0.125] * len(item.earlier) + [share]
            scores.append(Score(sum(turns), share, "", metrics, turns))
        else:
            last = len(item.token_ids) - 1
            tokens = {0: 0.125, last: share} if last else {0: 0.125 + share}
            scores.append(Score(0.125 + share, share, "", metrics, (), tokens))
    return scores


rank_siblings.scores = "groups"  # type: ignore[attr-defined]

STEPWISE = AlgorithmSpec(
    about="What a response is given from each token on.",
    section=PolicyLoss,
    make="tests.e2e.step_advantage:StepAdvantage",
    objective=POLICY_GRADIENT,
)

STUCK = AlgorithmSpec(
    about="The same, but it hangs.",
    section=PolicyLoss,
    make="tests.e2e.stuck_advantage:StuckAdvantage",
    objective=POLICY_GRADIENT,
)


def slow_reward(data_source: str, solution_str: str, ground_truth: str) -> float:
    """Never scores a response."""
    time.sleep(3600)
    return 0.0


def of_two_domains(items: Sequence[RewardItem], folder: str, fast: int) -> list[float]:
    """Records domain and reward rank of every response. The first of domain slow ends its reward rank, all others of it
    wait until `fast` responses of domain fast are scored."""
    notes = Path(folder)
    for item in items:
        name = f"{item.domain}.{item.sample_id}.{os.environ['HPCRL_RANK']}"
        if item.domain == "slow":
            if claimed(notes / "first"):
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(60)
            while len(list(notes.glob("fast.*"))) < fast:
                time.sleep(0.01)
        (notes / name).touch()
    return [float(item.response == item.answer) for item in items]
