"""How fast the reward of code is: HumanEval's solutions per second on two cores, at each level of the sandbox, and a
case beside the start of a bare interpreter. Prints one JSON line.

    python -m tests.bench.code_reward [--data FOLDER]      the folder that has humaneval/HumanEval.jsonl
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpcrl.config import RewardConfig
from hpcrl.rewards.builtin.code import CodeReward
from hpcrl.rewards.reward import RewardItem
from hpcrl.sandbox.client import Sandbox
from hpcrl.sandbox.jobs import ChildTask
from tests.bench.machine import tell

PROCESSES, TURNS, STARTS = 2, 3, 50


def score(items: list[RewardItem], level: int, turns: int, started: Callable[[], int]) -> None:
    """A worker: score its share of the solutions `turns` times, all workers at once."""
    reward = CodeReward(RewardConfig(name="code", timeout_s=60.0))
    reward._sandbox = Sandbox(level, max_level=level)
    started()
    for _ in range(turns):
        assert all(score.reward == 1.0 for score in reward.score(items))
        started()
    reward._sandbox.close()


def rate(items: list[RewardItem], level: int) -> float:
    """Median of solutions a second."""
    together = multiprocessing.Barrier(PROCESSES + 1)
    shares = [items[number::PROCESSES] for number in range(PROCESSES)]
    workers = [multiprocessing.Process(target=score, args=(share, level, TURNS, together.wait)) for share in shares]
    for worker in workers:
        worker.start()
    together.wait()
    seconds = []
    for _ in range(TURNS):
        start = time.perf_counter()
        together.wait()
        seconds.append(time.perf_counter() - start)
    for worker in workers:
        worker.join()
    return len(items) / statistics.median(seconds)


def median_ms(act: Callable[[], object]) -> float:
    """Median of some calls, milliseconds."""
    seconds = []
    for _ in range(STARTS):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return round(1e3 * statistics.median(seconds), 2)


def main() -> None:
    """Print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("HPCRL_DATA", "../shared/data")))
    rows = [
        json.loads(line) for line in (parser.parse_args().data / "humaneval/HumanEval.jsonl").open(encoding="utf-8")
    ]
    items = [RewardItem(n, "d", row["prompt"], row["canonical_solution"], None, row) for n, row in enumerate(rows)]
    rates = {f"L{level}_per_s": round(rate(items, level), 1) for level in (1, 2, 3)}
    sandbox = Sandbox(1, max_level=1)
    case = median_ms(lambda: sandbox.run([ChildTask({"kind": "program", "code": "pass"})], 10.0))
    bare = median_ms(lambda: subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True))
    sandbox.close()
    tell({"bench": "code_reward", "solutions": len(items), **rates, "case_ms": case, "interpreter_ms": bare})


if __name__ == "__main__":
    main()
