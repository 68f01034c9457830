"""What equal responses of a group cost: the reward of code on 12 groups of 8 programs of task:program, of which 8, 3
and 1 differ in each group, by one worker. Prints one JSON line.

python -m tests.bench.equal_responses
"""

from __future__ import annotations

import time
from typing import Any

import psutil

from hpcrl.config import Config, RewardConfig
from hpcrl.data.tasks import make_task
from hpcrl.rewards.reward import RewardItem
from hpcrl.rewards.serving.pool import RewardPool
from tests.bench.machine import tell

GROUPS, SIBLINGS, DIFFERENT = 12, 8, (8, 3, 1)


def items(different: int, seed: int) -> list[RewardItem]:
    """Responses to new rows; wrong ones have another summand."""
    task = make_task("task:program", {}, 1024, seed, "train")
    rows = [task.row(number) for number in range(GROUPS)]
    return [
        RewardItem(len(rows) * n + place, "d", row["prompt"], f"{row['response']}+{n % different}", row["answer"])
        for place, row in enumerate(rows)
        for n in range(SIBLINGS)
    ]


def cpu_s() -> float:
    """Of all processes below this one, the ended ones too."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system + each.children_user + each.children_system for each in times)


def score(pool: RewardPool, responses: list[RewardItem]) -> dict[str, float]:
    """Seconds and CPU-seconds until all are scored."""
    cpu, start = cpu_s(), time.perf_counter()
    pool.submit(responses)
    while pool.pending:
        pool.poll()
        time.sleep(0.002)
    return {"s": round(time.perf_counter() - start, 2), "cpu_s": round(cpu_s() - cpu, 2)}


def main() -> None:
    """Print the JSON line."""
    pool = RewardPool(Config(reward={"default": RewardConfig(name="code", options={"partial": True}, timeout_s=60.0)}))
    score(pool, items(1, seed=0))  # the start of its worker
    found: dict[str, Any] = {f"{count}_different": score(pool, items(count, seed=count)) for count in DIFFERENT}
    pool.close()
    tell({"bench": "equal_responses", "programs": GROUPS * SIBLINGS, **found})


if __name__ == "__main__":
    main()
