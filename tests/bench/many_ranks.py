"""How long many ranks of one machine take to join: start of the program to its first step, without a model.

    python -m tests.bench.many_ranks [--ranks 4 16 32]

One JSON line for each number of generator ranks: wall seconds, CPU seconds of all processes until then, and memory that
a rank has for itself. Three further ranks control, train and score. The CPU time of a rank is what its imports take; on
nodes with a core for each rank they take it side by side.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from tests.bench.machine import tell
from tests.e2e.program import Start

OTHERS = 3
WORDS = ["+experiment=demo", "cluster=local", "cluster.oversubscribe=true", "debug=fake", "layout=disaggregated"]
WORDS += ["layout.trainer.num_ranks=1", "max_steps=1", "save_every=0", "eval_every=0", "timeouts.start_s=550"]
WORDS += ["rollout.filter_std=false", "reward.default.num_processes=1", "fake.train_s=0", "fake.decode_s=0.001"]


def measure(folder: Path, num_ranks: int) -> dict[str, object]:
    """Start `num_ranks` generator ranks and wait for the first step."""
    begin = time.perf_counter()
    start = Start(folder, [*WORDS, f"layout.generator.num_ranks={num_ranks}"])
    start.wait_until(lambda: start.step == 1, 560)
    wall = time.perf_counter() - begin
    cpu = sum(sum(process.cpu_times()[:2]) for process in start.processes())
    own = [psutil.Process(pid).memory_full_info().uss / 2**20 for pid in start.ranks.values()]
    assert start.wait() == 0, start.text
    found = {"wall_s": round(wall, 1), "cpu_s": round(cpu, 1), "cpu_s_per_rank": round(cpu / (num_ranks + OTHERS), 2)}
    return {"bench": "many_ranks", "ranks": num_ranks + OTHERS, **found, "own_mib": round(statistics.median(own))}


def main() -> None:
    """Print the JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16])
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in parser.parse_args().ranks:
            tell(measure(Path(folder) / f"run_{num_ranks}", num_ranks))


if __name__ == "__main__":
    main()
