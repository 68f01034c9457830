"""Ownership of a run folder: by its newest attempt, or by a submitted job that still waits."""

from __future__ import annotations

import errno
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from hpcrl.cluster import slurm
from hpcrl.config import ConfigError
from hpcrl.run_folder.records import (
    OWNERS,
    SUBMITTED,
    newest_attempt,
    now,
    owner_path,
    read_owner,
    read_record,
    submitted_jobs,
)
from hpcrl.system.files import write_durably

SAME_START_S = 2.0  # two readings of a process start differ by less, even if the clock is stepped in between


class SupersededError(RuntimeError):
    """Another attempt has taken over the run."""


def claim(run_dir: Path, attempt: int, lasts: bool) -> bool:
    """Create the attempt's record; False if another launch was faster. With `lasts`, the run ends with this process,
    even if its job continues."""
    (run_dir / OWNERS).mkdir(parents=True, exist_ok=True)
    own, process = slurm.own_job(os.environ), psutil.Process()
    owner: dict[str, Any] = {"since": now(), "host": platform.node()}
    if own is not None:
        owner |= {"job": own[0], "restarts": own[1], "cluster": os.environ.get("SLURM_CLUSTER_NAME", "")}
    if own is None or lasts:
        owner |= {"pid": process.pid, "process_start": process.create_time()}
    try:
        descriptor = os.open(owner_path(run_dir, attempt), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    with open(descriptor, "wb") as file:
        file.write(json.dumps(owner).encode())
        file.flush()
        os.fsync(file.fileno())
    return True


def close_run(run_dir: Path, attempt: int, **told: Any) -> None:
    """Release the run, so the next launch need not check whether its owner is alive. `told` is how the run ended."""
    check_owner(run_dir, attempt)
    owner = read_owner(run_dir, attempt)
    write_durably(owner_path(run_dir, attempt), json.dumps(owner | {"ended": now(), **told}).encode())


def check_owner(run_dir: Path, attempt: int) -> None:
    """Raise SupersededError unless `attempt` still owns the run, FileNotFoundError if its folder is gone. Any process
    of the attempt may call this."""
    newest = newest_attempt(run_dir)
    if not newest:
        raise FileNotFoundError(errno.ENOENT, "the run folder was removed or moved while the run used it", str(run_dir))
    if newest != attempt:
        raise SupersededError(f"attempt {attempt} of {run_dir} may not commit: attempt {newest} now owns the run")


def check_free(folder: Path) -> int:
    """The newest attempt, 0 without one; ConfigError names its owner if the owner may still run."""
    jobs, own = submitted_jobs(folder), slurm.own_job(os.environ)
    for job in [] if own is not None and own[0] in jobs else jobs:  # this job may be a job of the chain
        cluster = read_record(folder / SUBMITTED).get("cluster", "")
        _check_job_gone(f"{folder} belongs to job {job}", folder / SUBMITTED, job, -1, cluster)
    attempt = newest_attempt(folder)
    if not attempt:
        return 0
    path = owner_path(folder, attempt)
    deadline = time.monotonic() + 1.0
    while not (owner := read_owner(folder, attempt)) and time.monotonic() < deadline:
        time.sleep(0.02)  # created, not yet written
    # If the record stays empty, its launch died here; a launch that was only stopped no longer has the highest number.
    if not owner or "ended" in owner:
        return attempt
    if lives_as_job(owner):
        held = f"{folder} is held by job {owner['job']} since {owner['since']} (attempt {attempt})"
        _check_job_gone(held, path, owner["job"], owner["restarts"], owner.get("cluster", ""))
        return attempt
    held = f"{folder} is held by pid {owner['pid']} on host {owner['host']} since {owner['since']} (attempt {attempt})"
    if owner["host"] != platform.node():
        raise ConfigError([f"{held}; if that process is gone, remove {path}"])
    if process_lives(owner["pid"], owner["process_start"]):
        raise ConfigError([f"{held}; wait for it, stop it, or use another run_name"])
    return attempt


def lives_as_job(owner: Mapping[str, Any]) -> bool:
    """Whether Slurm must be queried about a run's owner: not if the owner is a process that can be checked directly."""
    return "job" in owner and not ("pid" in owner and ("ended" in owner or owner["host"] == platform.node()))


def process_lives(pid: int, start: float) -> bool:
    """Whether the process with this pid and start time still runs; another process may have the pid by now."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - start) < SAME_START_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _check_job_gone(held: str, record: Path, number: int, restarts: int, cluster: str) -> None:
    """ConfigError if the job runs or may still run, unless it is this job, requeued since then. `cluster` is the job's
    cluster, empty if unknown; jobs of another cluster cannot be queried here."""
    if (own := slurm.own_job(os.environ)) is not None and own[0] == number and own[1] > restarts:
        return
    try:
        here = slurm.cluster_name() if cluster else ""
        if here != cluster:
            raise ConfigError(
                [f"{held}, on cluster {cluster}, but this is {here}; if it is gone there, remove {record}"]
            )
        job = slurm.find_job(number)
    except slurm.SlurmError as error:
        raise ConfigError(
            [f"{held}, but Slurm cannot tell whether it lives: {error}; if not, remove {record}"]
        ) from error
    if job is not None and job.lives:
        state = job.state.lower()
        remedy = f"wait for it, scancel {number}" if state != "completing" else "it is about to end: wait a moment"
        if job.held:
            state, remedy = f"held ({job.reason})", f"scontrol release {number}, scancel {number}"
        raise ConfigError([f"{held}, which is {state}; {remedy}, or use another run_name"])
