"""One run as a submitit job: submits it, waits for it, prints its result. Adapt RUN and CLUSTER to your site.

    python launch/rlvr.py [KEY=VALUE ...]

The words go to hpcrl after those of RUN: python launch/rlvr.py +experiment=rlvr_tiny run_name=first
"""

from __future__ import annotations

import argparse

from hpcrl.launch.executor import HpcrlExecutor, run
from hpcrl.system.cli import in_shell

RUN = ("+experiment=rlvr_7b",)
CLUSTER = {"time": "12:00:00"}  # keys of cluster.*: account, partition, qos, modules, prologue, ...


def main() -> None:
    parser = argparse.ArgumentParser(
        description=in_shell(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    words = parser.parse_args().words
    executor = HpcrlExecutor("runs")
    executor.update_parameters(**CLUSTER)
    job = executor.submit(run, *RUN, *words)
    print(f"job {job.job_id} is {job.state.lower()}; tail -F {job.paths.stdout}", flush=True)
    result = job.result()  # raises with the run's own line where it fails
    print(f"step {result['step']}: {result['reason']}; policy in {result['hf']}")


if __name__ == "__main__":
    main()
