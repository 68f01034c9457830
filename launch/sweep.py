"""Learning rates x seeds, all in the queue at once; prints the reward of each as they end, then the best rate.

    python launch/sweep.py [--lr LR ...] [--seed SEED ...] [KEY=VALUE ...]

The words go to hpcrl after those of RUN. Without Python: python -m hpcrl.launch -m +cluster=slurm trainer.lr=1e-6,5e-6
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from functools import partial
from itertools import product
from statistics import mean

from submitit.core.utils import UncompletedJobError
from submitit.helpers import as_completed

from hpcrl.launch.executor import HpcrlExecutor, run
from hpcrl.system.cli import in_shell

RUN = ("+experiment=rlvr_7b",)
CLUSTER = {"time": "12:00:00"}
METRIC = "critic/rewards/mean"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=in_shell(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 5e-6])
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1])
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    options, more = parser.parse_known_args()
    executor = HpcrlExecutor("runs")
    executor.update_parameters(**CLUSTER)
    points = list(product(options.lr, options.seed))
    names = [f"lr{lr:g}_seed{seed}" for lr, seed in points]
    runs = [
        partial(run, *RUN, *options.words, *more, f"trainer.lr={lr}", f"seed={seed}", f"run_name={name}")
        for (lr, seed), name in zip(points, names, strict=True)
    ]
    jobs = executor.submit_array(runs)  # all are checked before the first is submitted
    print(f"jobs {', '.join(job.job_id for job in jobs)}", flush=True)
    rewards: dict[float, list[float]] = defaultdict(list)
    for job in as_completed(jobs, poll_frequency=1):
        (lr, _), name = points[jobs.index(job)], names[jobs.index(job)]
        try:
            rewards[lr].append(job.result()["metrics"][METRIC])
            print(f"{name:<20} {METRIC} {rewards[lr][-1]:.3f}", flush=True)
        except UncompletedJobError as error:
            print(f"{name:<20} {error}", flush=True)
    if rewards:
        best = max(rewards, key=lambda lr: mean(rewards[lr]))
        print(f"best lr {best:g}: {mean(rewards[best]):.3f} over {len(rewards[best])} seed(s)")


if __name__ == "__main__":
    main()
