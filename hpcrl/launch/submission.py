"""From a checked run to a job in Slurm's queue."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.cluster import slurm
from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Placement
from hpcrl.config import Config, ConfigError
from hpcrl.files import write_durably
from hpcrl.launch.render import render
from hpcrl.rundir import SLURM, record_submission
from hpcrl.signals import held_back


def submit(config: Config, layout: RoleLayout, argv: Sequence[str]) -> list[int]:
    """Write the batch script into the run folder and submit it; returns the job's id, of a chain those of all links.

    SlurmError with Slurm's reason, ConfigError where the script cannot be written; then nothing is left in the queue.
    """
    run_dir = Path(config.run_dir)
    words = [word for word in argv if not word.startswith(("run_dir=", "resume="))]
    script = run_dir / SLURM / "job.sbatch"
    words += [f"run_dir={run_dir}", *(["resume=auto"] if config.resume == "fresh" else [])]  # fresh is done with
    text = render(config, Placement.from_config(config, layout), words, shlex.quote(sys.executable))
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        write_durably(script, text.encode())
    except OSError as error:
        raise ConfigError([f"run folder {run_dir} cannot be written: {error}"]) from error
    jobs: list[int] = []
    cluster = slurm.cluster_name()
    try:
        for _ in range(config.cluster.num_links if config.cluster.after == "chain" else 1):
            with held_back():  # an interrupt would leave a job in the queue that nobody knows of
                jobs.append(slurm.submit(script, script.parent / "job-%j.log", after=jobs[-1] if jobs else None))
                record_submission(run_dir, jobs, cluster)
    except (OSError, KeyboardInterrupt):  # no note of a job that is in the queue, or half a chain
        slurm.cancel(jobs)
        raise
    except slurm.SlurmError as error:
        slurm.cancel(jobs)
        raise slurm.SlurmError(f"Slurm refuses the job: {error} (script: {script})") from error
    return jobs
