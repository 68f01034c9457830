"""A supervised warm-up, then reinforcement learning from it: two jobs, the second submitted when the first is done.

    python launch/two_stages.py [KEY=VALUE ...] [--warm-up KEY=VALUE ...]

The same command again continues: a stage that is finished is not run again, one that is queued or running is waited
for, one that was interrupted resumes from its checkpoint. Words go to the second stage, those after --warm-up to
the first.
"""

from __future__ import annotations

import argparse
from typing import Any

from hpcrl.launch.executor import HpcrlExecutor, RunJob, run
from hpcrl.system.cli import in_shell

WARM_UP = ("+experiment=demo_sft",)
TRAIN = ("+experiment=demo",)
CLUSTER = {"time": "01:00:00", "after": "requeue"}  # after: chain, where the site forbids a job to requeue itself


def stage(executor: HpcrlExecutor, name: str, *words: str) -> dict[str, Any]:
    """Result of the run of that name, which is submitted unless it is there."""
    job = RunJob.of_run(executor.folder / name)
    if job.done(force_check=True):
        job = executor.submit(run, *words, f"run_name={name}")
    print(f"{name}: job {job.job_id} is {job.state.lower()}; {job.paths.stdout}", flush=True)
    return job.result()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=in_shell(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--warm-up", nargs="+", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    executor = HpcrlExecutor("runs")
    executor.update_parameters(**CLUSTER)
    warm = stage(executor, "warm_up", *WARM_UP, *options.warm_up)
    done = stage(executor, "train", *TRAIN, *options.words, f"model.path={warm['hf']}")
    print(f"step {done['step']}: {done['reason']}; policy in {done['hf']}")


if __name__ == "__main__":
    main()
