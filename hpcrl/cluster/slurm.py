"""Queries and requests to Slurm through its commands. Every call has a deadline; imports no torch."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

CALL_S = 30.0
TRIAL_S = 10.0
AGAIN_S = 5.0  # between two calls while Slurm's controller does not answer
NO_ANSWER = re.compile(
    "unable to contact slurm controller|timed out on send/recv|zero bytes were transmitted|in standby mode"
    "|unexpected message received",  # message of scontrol requeue if the controller does not answer (22.05)
    re.IGNORECASE,
)
REFUSED = "allocation failure:"
"""Start of Slurm's reason in the output of sbatch --test-only."""
ENVIRON = {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}  # messages in English, times as seconds since the epoch
LAUNCH_FAILED = "launch_failed_requeued_held"
"""Reason with which Slurm holds a job whose node failed at its start, until the job is released."""
LIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "REQUEUED", "RESIZING", "SIGNALING")
DECIDED = tuple(f"SBATCH_{name}" for name in ("ARRAY_INX", "NO_REQUEUE", "REQUEUE", "TIMELIMIT", "WAIT"))
"""Environment variables that would override settings that every script of hpcrl.launch needs."""
GPU_VARIABLES = ("SBATCH_GRES", "SBATCH_GPUS", "SBATCH_GPUS_PER_NODE", "SBATCH_GPUS_PER_TASK", "SBATCH_GPUS_PER_SOCKET")
OF_OPTION = {
    "mem": ("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"),
    "switches": ("SBATCH_REQ_SWITCH",),
    **dict.fromkeys(("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"), GPU_VARIABLES),
}
"""Option of a script -> the corresponding variables of sbatch, if their names differ."""
FOR_SRUN = re.compile(
    "SRUN_.+|SLURM_(CPU_BIND|CPUS_PER_TASK|DISTRIBUTION|EXACT|EXCLUSIVE|HINT|KILL_BAD_EXIT|LABELIO|MEM_BIND|MPI_TYPE|"
    "NNODES|NO_KILL|NPROCS|NTASKS|NTASKS_PER_NODE|OVERLAP|THREADS|THREADS_PER_CORE|WAIT)"
)
"""Variables of srun that a user's shell has only if they were set there."""

T = TypeVar("T")


class SlurmError(RuntimeError):
    """Slurm refused a request or cannot be queried; the text is Slurm's, on one line."""


class SlurmSilent(SlurmError):
    """Slurm's controller did not answer; a retry may succeed."""


@dataclass(frozen=True)
class Job:
    """A job as shown by `scontrol show job`; for a heterogeneous job, its leader."""

    id: int
    state: str
    restarts: int
    preempted: bool
    reason: str
    end: float | None
    """End of its time limit, seconds since the epoch; None without a limit or before its start."""

    @property
    def lives(self) -> bool:
        """Whether it is running, waiting or completing."""
        return self.state in LIVE

    @property
    def held(self) -> bool:
        """Whether it is held, by a user, an administrator, or Slurm after a failed launch."""
        return self.state in ("PENDING", "REQUEUED") and "held" in self.reason.lower()


def find_job(job_id: int, timeout_s: float = CALL_S) -> Job | None:
    """The job; None if Slurm no longer has it. SlurmError if Slurm cannot be queried within timeout_s."""
    try:
        text = call("scontrol", "--oneliner", "show", "job", str(job_id), timeout_s=timeout_s)
    except SlurmError as error:
        if "invalid job id" in str(error).lower():
            return None
        raise
    values = dict(re.findall(r"(\w+)=(\S*)", text.splitlines()[0]))
    end = values.get("EndTime", "")
    return Job(
        job_id,
        values["JobState"],
        int(values.get("Restarts", 0)),
        values.get("PreemptTime", "None") not in ("None", "Unknown"),
        values.get("Reason", ""),
        float(end) if end.isdigit() and values["JobState"] != "PENDING" else None,
    )


def find_accounted(job_id: int) -> Job | None:
    """A job that find_job cannot find, from the accounting database; None if it has no record."""
    try:
        states = call("sacct", "-n", "-X", "-P", "-j", str(job_id), "-o", "State").split()  # CANCELLED by 1000
    except SlurmError:
        return None
    # A record that was never closed (for example, after a loss of the controller's state) does not mean a live job.
    return Job(job_id, states[0], 0, states[0] == "PREEMPTED", "", None) if states and states[0] not in LIVE else None


def submit(script: Path, output: Path, *, after: int | None = None) -> tuple[int, str]:
    """Submit a script whose output goes to `output`, after the job `after` has ended in any way. Returns the (leader's)
    job id, and the cluster's name if sbatch reports one, as in a federation. SlurmError with Slurm's reason. The
    script's options override environment variables."""
    set_here, _ = colliding(script.read_text(), os.environ)
    options = [f"--output={output}", *([f"--dependency=afterany:{after}"] if after is not None else [])]
    said = call("sbatch", "--parsable", *options, str(script), environ=_without(os.environ, set_here))
    if (found := re.match(r"(\d+)(?:;(\S+))?$", said.strip())) is None:
        raise SlurmError(f"sbatch printed no job id, but {' '.join(said.split())!r}")
    return int(found[1]), found[2] or ""


def trial(script: str) -> str:
    """Slurm's answer to this script, which is not queued: when and where the job would start. SlurmError with Slurm's
    reason if it refuses the job, SlurmSilent if Slurm could not be queried, for example without Slurm."""
    set_here, _ = colliding(script, os.environ)
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file:
        file.write(script)
        file.flush()
        command, environ = ("sbatch", "--test-only", file.name), _without(os.environ, set_here)
        try:
            said = call(*command, environ=environ, timeout_s=TRIAL_S, told=True)
        except SlurmError as error:
            if REFUSED not in (text := str(error)):
                raise SlurmSilent(text.rpartition("; ")[2]) from None
            raise SlurmError(text.replace(REFUSED, "").strip(" ;")) from None
    said = re.sub(r"(?<=to start at )\d+", lambda at: f"{datetime.fromtimestamp(int(at[0])):%Y-%m-%d %H:%M}", said)
    return "; ".join(line.removeprefix("sbatch: ") for line in said.splitlines())


def _without(environ: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """The environment without these names, and without variables through which a job would affect the srun of jobs that
    are submitted from inside it."""
    inside = "SLURM_JOB_ID" in environ
    foreign = {name for name in environ if inside and name.startswith("SLURM_") and name != "SLURM_CONF"}
    return {name: value for name, value in environ.items() if name not in {*foreign, *names, "HPCRL_RANK"}}


def colliding(script: str, environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Environment variables that sbatch or the script's srun would read: (variables that the script sets itself, which
    are not passed on; variables that affect the job). For sbatch, a variable overrides a line of the script, in every
    component."""
    given = set(re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE))
    decided = {*DECIDED, *(name for option in given for name in OF_OPTION.get(option, (_variable(option),)))}
    for_sbatch = sorted(name for name in environ if name.startswith("SBATCH_"))
    for_srun = sorted(name for name in environ if FOR_SRUN.fullmatch(name) and "SLURM_JOB_ID" not in environ)
    left_out = [name for name in for_sbatch if name in decided]
    return left_out, [name for name in (*for_sbatch, *for_srun) if name not in left_out]


def _variable(option: str) -> str:
    return f"SBATCH_{option.upper().replace('-', '_')}"


def cancel(jobs: Collection[int], states: Collection[str] = LIVE) -> None:
    """Cancel the jobs that are in one of the states."""
    found = [job for job in map(find_job, jobs) if job is not None and job.state in states]
    if found:
        call("scancel", *(str(job.id) for job in found))


def requeue(job_id: int) -> None:
    """Requeue a running job; Slurm ends its remaining processes."""
    call("scontrol", "requeue", str(job_id))


def release(job_id: int) -> None:
    call("scontrol", "release", str(job_id))


def insist(ask: Callable[[], T], seconds: float) -> T:
    """The result of `ask`, repeated for this long while the controller does not answer; then SlurmSilent."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except SlurmSilent:
            if time.monotonic() > deadline:
                raise
            time.sleep(AGAIN_S)


def own_job(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """(job id, restart count) of this process's job; for a heterogeneous job, its leader's."""
    name = environ.get("SLURM_HET_JOB_ID") or environ.get("SLURM_JOB_ID", "")
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    return (int(name), int(restarts) if restarts.isdigit() else 0) if name.isdigit() else None


def cluster_name() -> str:
    """Name of the cluster that Slurm's commands use; a job id is valid only on its cluster."""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", call("scontrol", "show", "config"), re.MULTILINE)
    return found[1] if found else ""


def own_nodes(environ: Mapping[str, str]) -> list[int]:
    """Nodes of each component of the job whose batch script runs this process; a plain job has one component."""
    num = int(environ.get("SLURM_HET_SIZE") or 0)
    names = [f"SLURM_JOB_NUM_NODES_HET_GROUP_{i}" for i in range(num)] or ["SLURM_JOB_NUM_NODES"]
    return [int(environ[name]) for name in names]


def call(*command: str, environ: Mapping[str, str] = os.environ, timeout_s: float = CALL_S, told: bool = False) -> str:
    """Output of a Slurm command; with `told`, its standard error as well. SlurmError with its messages."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env={**environ, **ENVIRON},
        )
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]} is not installed on this machine; run this where Slurm's commands are available"
        ) from None
    except OSError as error:
        raise SlurmError(f"{command[0]} cannot be started: {error.strerror or error}") from error
    except subprocess.TimeoutExpired:
        raise SlurmSilent(f"{command[0]} gave no answer within {timeout_s:g} s") from None
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        text = "; ".join(dict.fromkeys(lines)) or f"{command[0]} ended with code {done.returncode}"
        raise SlurmSilent(text) if NO_ANSWER.search(text) else SlurmError(text)
    return done.stdout + (done.stderr if told else "")
