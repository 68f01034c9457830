"""From the start of the program to its first trained step, on 3 ranks (one controller, two workers), fresh each time.

One JSON line: best and median of some starts in seconds of wall time, and of CPU time of all processes until then. The
wall time of an idle machine is near the CPU time divided by its cores, or by 3 where it has more.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from tests.bench.machine import tell
from tests.e2e.program import Start

STARTS = 5
WORDS = ["+experiment=demo", "max_steps=1", "save_every=0", "eval_every=0", "rollout.num_prompts=8"]
WORDS += ["rollout.group_size=4", "rollout.max_new_tokens=8", "rollout.filter_std=false"]


def measure(folder: Path) -> tuple[float, float]:
    """(wall, CPU) seconds until the first step is reported."""
    begin = time.perf_counter()
    start = Start(folder, WORDS)
    start.wait_until(lambda: start.step == 1)
    wall = time.perf_counter() - begin
    cpu = sum(sum(process.cpu_times()[:2]) for process in start.processes())
    assert start.wait() == 0, start.text
    return wall, cpu


def main() -> None:
    """Print the JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        walls, cpus = zip(*(measure(Path(folder) / f"run_{i}") for i in range(STARTS)), strict=True)
    result: dict[str, object] = {"bench": "first_step", "ranks": 3}
    result["wall_s"] = {"best": round(min(walls), 2), "median": round(statistics.median(walls), 2)}
    result["cpu_s"] = {"best": round(min(cpus), 2), "median": round(statistics.median(cpus), 2)}
    tell(result)


if __name__ == "__main__":
    main()
