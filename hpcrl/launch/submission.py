"""Submits a checked run to Slurm, one launch at a time, so a run is queued only once."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from hpcrl.cluster import slurm
from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Placement
from hpcrl.config import Config, ConfigError
from hpcrl.config.config_file import write_config
from hpcrl.launch.frozen import SUBMITTED_CONFIG
from hpcrl.launch.render import render
from hpcrl.run_folder import SLURM, check_run, process_lives, read_record, record_submission
from hpcrl.system.files import write_durably
from hpcrl.system.signals import held_back

CLAIMS = f"{SLURM}/submissions"
"""In a run folder: a record of each launch that was allowed to submit."""
WRITTEN_S = 1.0
"""How long a record may be empty while its launch is alive."""


def submit(config: Config, layout: RoleLayout, arguments: Sequence[str] | None) -> tuple[list[int], str]:
    """Write the configuration, the arguments that made it and the batch script into the run folder, and submit the
    script; returns the job id (for a chain, all job ids) and the cluster.

    SlurmError with Slurm's reason; ConfigError if the script cannot be written, or if another launch submits or has
    submitted this run. After an error, this launch has left nothing in the queue.
    """
    run_dir = Path(config.run_dir)
    script = run_dir / SLURM / "job.sbatch"
    try:
        with _alone(run_dir):
            check_run(config.model_dump(mode="json"), run_dir, "auto")  # earlier findings may be outdated
            # fresh has already taken effect
            frozen = config.model_dump(mode="json") | {"resume": "auto"}
            write_durably(run_dir / SUBMITTED_CONFIG, write_config(frozen, arguments))
            write_durably(script, script_of(config, layout).encode())
            return _submit(config, script)
    except OSError as error:
        raise ConfigError([f"run folder {run_dir} cannot be written: {error}"]) from error


def script_of(config: Config, layout: RoleLayout) -> str:
    """The batch script of a run, which starts from the configuration that was submitted."""
    arguments = ["--config", str(Path(config.run_dir) / SUBMITTED_CONFIG)]
    return render(config, Placement.from_config(config, layout), arguments, shlex.quote(sys.executable))


def _submit(config: Config, script: Path) -> tuple[list[int], str]:
    jobs: list[int] = []
    cluster = slurm.cluster_name()
    try:
        for _ in range(config.cluster.num_links if config.cluster.after == "chain" else 1):
            with held_back():  # an interrupt would leave an unrecorded job in the queue
                job, went_to = slurm.submit(script, script.parent / "job-%j.log", after=jobs[-1] if jobs else None)
                jobs.append(job)
                record_submission(Path(config.run_dir), jobs, went_to or cluster)
    except (OSError, KeyboardInterrupt):  # a queued job without a record, or half a chain
        slurm.cancel(jobs)
        raise
    except slurm.SlurmError as error:
        slurm.cancel(jobs)
        raise slurm.SlurmError(f"Slurm refuses the job: {error} (script: {script})") from error
    return jobs, went_to if went_to != cluster else ""


@contextlib.contextmanager
def _alone(run_dir: Path) -> Iterator[None]:
    """Hold the right to submit this run. ConfigError names the launch that holds it.

    A claim is a record created with O_EXCL under the number after the newest claim, once that claim has ended or its
    process is dead; only one of several launches succeeds. The newest claim is never removed, since its number would be
    reused.
    """
    folder = run_dir / CLAIMS
    folder.mkdir(parents=True, exist_ok=True)
    newest = max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=0)
    _check_ended(run_dir, folder / f"{newest:04d}")
    mine, process = folder / f"{newest + 1:04d}", psutil.Process()
    holder = {"pid": process.pid, "process_start": process.create_time(), "host": platform.node()}
    try:
        with mine.open("x") as file:
            json.dump(holder, file)
    except FileExistsError:
        text = f"run folder {run_dir}: another launch is submitting this run; repeat the command to see its job"
        raise ConfigError([text]) from None
    try:
        yield
    finally:
        write_durably(mine, json.dumps(holder | {"ended": True}).encode())
        for path in folder.iterdir():
            if path.name.isdigit() and int(path.name) <= newest:
                path.unlink(missing_ok=True)


def _check_ended(run_dir: Path, claim: Path) -> None:
    deadline = time.monotonic() + WRITTEN_S
    while not (holder := read_record(claim, pid=int, host=str, process_start=float)):
        if not claim.exists() or time.monotonic() > deadline:  # none yet, or its launch died at this point
            return
        time.sleep(0.02)
    if "ended" in holder:
        return
    held = f"run folder {run_dir}: pid {holder['pid']} on host {holder['host']} is submitting this run"
    if holder["host"] != platform.node():
        raise ConfigError([f"{held}; if that process is gone, remove {claim}"])
    if process_lives(holder["pid"], holder["process_start"]):
        raise ConfigError([f"{held}; repeat the command to see its job"])


def trial(config: Config, layout: RoleLayout) -> list[str]:
    """A line for a dry run: when Slurm would start the job, why it would refuse the job, or why it was not queried."""
    if config.cluster.name != "slurm":
        return []
    try:
        return [f"slurm   accepts the job: {slurm.trial(script_of(config, layout))}"]
    except slurm.SlurmSilent as error:
        return [f"slurm   note: could not check whether it accepts the job: {error}"]
    except slurm.SlurmError as error:
        return [f"slurm   note: it would refuse the job: {error}"]


def environment_notes(config: Config, layout: RoleLayout) -> list[str]:
    """A line of the plan for each variable of sbatch and srun in this shell: whether it affects the job."""
    if config.cluster.name != "slurm":
        return []
    left_out, held = slurm.colliding(script_of(config, layout), os.environ)
    return [
        *(f"shell   note: {name}={os.environ[name]} is not passed on: the run sets it itself\n" for name in left_out),
        *(f"shell   note: {name}={os.environ[name]} affects all nodes of the job\n" for name in held),
    ]
