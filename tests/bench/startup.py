"""How fast the front door opens: --help and the checks of a whole configuration, each in a fresh interpreter.

One JSON line: the best and the median of some starts, in seconds of wall time and of CPU time, and whether torch was
imported. An empty interpreter is measured beside it, so that the figure can be read on a slow or loaded machine.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time

from tests.bench.machine import tell

STARTS = 7
ASSERT = """
import sys
from hpcrl.launch.__main__ import main
assert main(sys.argv[1:]) == 0 and "torch" not in sys.modules
"""
NEW = "run_dir=runs/never_started"
COMMANDS = {
    "empty": ["-c", "pass"],
    "help": ["-c", ASSERT, "--help"],
    "validate": ["-c", ASSERT, "+experiment=demo", "cluster=local", "dry_run=true", NEW],
    "validate_256_gpus": ["-c", ASSERT, "+experiment=rlvr_200b", "dry_run=true", NEW],
}


def measure(words: list[str]) -> tuple[float, float]:
    """(wall, CPU) seconds of one start."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words], env=environment, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the JSON line."""
    result: dict[str, object] = {"bench": "startup", "torch_imported": False}
    for name, words in COMMANDS.items():
        walls, cpus = zip(*(measure(words) for _ in range(STARTS)), strict=True)
        result[f"{name}_wall_s"] = {"best": round(min(walls), 3), "median": round(statistics.median(walls), 3)}
        result[f"{name}_cpu_s"] = {"best": round(min(cpus), 3), "median": round(statistics.median(cpus), 3)}
    tell(result)


if __name__ == "__main__":
    main()
