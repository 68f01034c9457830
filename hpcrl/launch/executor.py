"""hpcrl runs as submitit jobs: the interface of submitit, with the scripts of hpcrl.launch. Needs the extra `slurm`.

    executor = HpcrlExecutor("runs")
    job = executor.submit(run, "+experiment=demo", "max_steps=10")
    job.result()["metrics"]

Also available as submitit.AutoExecutor(cluster="hpcrl"). Unlike submitit's own jobs, a job may be heterogeneous. It
includes its requeues and ends when Slurm ends it. Its state comes from scontrol, and from sacct only if scontrol has
forgotten the job: submitit's own use of sacct waits forever without accounting. The result is read from the run folder;
nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.core import logger
from submitit.core.core import Executor, InfoWatcher, Job
from submitit.core.utils import DelayedSubmission, FailedJobError, JobPaths, UncompletedJobError

from hpcrl.cluster import slurm
from hpcrl.commands.status import RunFolder, last_error
from hpcrl.config import Config, ConfigError, read
from hpcrl.launch.prepare import prepare
from hpcrl.launch.submission import submit
from hpcrl.run_folder import FINISHED, SLURM, submitted_jobs
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.log import message_of

FORGOTTEN = "FORGOTTEN"
"""State of a job that ended minutes ago: scontrol no longer lists it, and sacct does not answer either."""
MAX_RELEASES = 3
"""Maximum releases of a job. If Slurm holds it again each time, a node must be repaired or excluded."""
NO_JOB = "none"
"""Job id of a run that was already finished."""


def run(*arguments: str) -> tuple[str, ...]:
    """The arguments of a run to submit, as for `python -m hpcrl.launch`."""
    return arguments


class RunWatcher(InfoWatcher):
    """The states of all jobs of this process, from Slurm. Releases a job, a few times, that Slurm holds because a node
    failed at its start."""

    def __init__(self, delay_s: int = 60):
        super().__init__(delay_s)
        self._released: Counter[str] = Counter()

    def update(self) -> None:
        """Query every job that has not ended. If Slurm cannot be queried, states are unchanged."""
        self._num_calls += 1
        for job_id in sorted(self._registered - self._finished):
            try:
                job = None if job_id == NO_JOB else slurm.find_job(int(job_id)) or slurm.find_accounted(int(job_id))
            except slurm.SlurmError as error:
                logger.get_logger().warning(f"the state of job {job_id} is unknown: {error}")
                break
            if job is not None and job.held and job.reason == slurm.LAUNCH_FAILED:
                self._release(job_id)
            self._info_dict[job_id] = {"JobID": job_id, "State": job.state if job else FORGOTTEN}
            if job is None or not job.lives:
                self._finished.add(job_id)
        self._last_status_check = time.time()

    def _release(self, job_id: str) -> None:
        if self._released[job_id] < MAX_RELEASES:
            self._released[job_id] += 1
            with contextlib.suppress(slurm.SlurmError):  # not permitted: status shows what to do
                slurm.release(int(job_id))

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Slurm's state of the job, FORGOTTEN, or UNKNOWN before the first answer."""
        return self.get_info(job_id, mode=mode).get("State", "UNKNOWN")

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether the job has ended and is not requeued."""
        self.get_info(job_id, mode=mode)
        return job_id in self._finished


class RunPaths(JobPaths):
    """The paths of hpcrl.launch under submitit's names."""

    @property
    def submission_file(self) -> Path:
        """The batch script."""
        return self.folder / "job.sbatch"

    @property
    def stdout(self) -> Path:
        """Output of the script and all agents, including errors."""
        return self.folder / f"job-{self.job_id}.log"


class RunJob(Job[dict[str, Any]]):
    """A submitted run; `folder` is its run folder. For a chain, the job id is the first job's, and the run is done when
    all jobs of the chain have ended. of_run() recreates the object in any process."""

    watcher = RunWatcher(delay_s=10)

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)):
        self.run_dir = Path(folder)
        links = [str(job) for job in submitted_jobs(self.run_dir)]
        self.links = links if job_id in links else [job_id]
        super().__init__(folder, job_id, tasks)
        self._paths = RunPaths(self.run_dir / SLURM, job_id=job_id)

    @classmethod
    def of_run(cls, run_dir: Path) -> RunJob:
        """The newest submission of this run."""
        return cls(run_dir, str(next(iter(submitted_jobs(run_dir)), NO_JOB)))

    def _register_in_watcher(self) -> None:
        for link in self.links:
            self.watcher.register_job(link)

    def done(self, force_check: bool = False) -> bool:
        """Whether the run's jobs have ended. If not forced, Slurm is queried only every few seconds."""
        return all(self.watcher.is_done(link, mode="force" if force_check else "standard") for link in self.links)

    @property
    def state(self) -> str:
        """Slurm's state of the running or waiting job; at the end COMPLETED, or the state of the last job."""
        states = {link: self.watcher.get_state(link) for link in self.links}
        if alive := [state for link, state in states.items() if not self.watcher.is_done(link, mode="cache")]:
            return alive[0]
        ran = [state for link, state in states.items() if self._log(link).exists()]
        return "COMPLETED" if self._finished() else (ran or list(states.values()))[-1]

    def cancel(self, check: bool = True) -> None:
        """Cancel the job; the run folder can be resumed. With check, SlurmError if Slurm refuses."""
        try:
            slurm.cancel([int(link) for link in self.links if link != NO_JOB])
        except slurm.SlurmError:
            if check:
                raise

    def stdout(self) -> str | None:
        """Output of the jobs so far, including errors, in order; None before the first has started."""
        logs = [self._log(link).read_text(errors="replace") for link in self.links if self._log(link).exists()]
        return "".join(logs) if logs else None

    def results(self) -> list[dict[str, Any]]:
        """Wait for the run; returns a list with one dict: run_dir, exit_code, step, reason, metrics (the last row) and
        hf (the policy's folder). FailedJobError with the run's error line; UncompletedJobError if it was cancelled."""
        if (error := self.exception()) is not None:
            raise error
        run = RunFolder(self.run_dir)
        return [
            {
                "run_dir": str(self.run_dir),
                "exit_code": int(ExitCode.DONE),
                "step": run.finished["step"],
                "reason": run.finished["reason"],
                "metrics": run.rows[-1] if run.rows else {},
                "hf": str(self.run_dir / "hf"),
            }
        ]

    def exception(self) -> UncompletedJobError | None:
        """Wait for the run; returns the error that results() raises, None for a finished run."""
        self.wait()
        state = self.state
        # On a shared file system, files of another node may appear late.
        deadline = time.monotonic() + (self._results_timeout_s if state == "COMPLETED" else 0)
        while not self._finished():
            if time.monotonic() > deadline:
                kind = UncompletedJobError if state == "CANCELLED" else FailedJobError
                return kind(f"{self.run_dir}: {self._why()} (job {self.job_id}, {state.lower()}; {self.paths.stdout})")
            time.sleep(0.2)
        return None

    def _finished(self) -> bool:
        return (self.run_dir / FINISHED).exists()

    def _log(self, link: str) -> Path:
        return RunPaths(self.run_dir / SLURM, job_id=link).stdout

    def _why(self) -> str:
        """The message of these jobs' last attempt, else the last line of their output."""
        run = RunFolder(self.run_dir)
        if str(run.owner.get("job")) in self.links and (error := last_error(run)):
            return f"{run.owner.get('how', 'lost')}: {error}"
        lines = (self.stdout() or "").split("\n")
        return next((message_of(line) for line in reversed(lines) if line.strip()), "the job never started")


class HpcrlExecutor(Executor):
    """Submits runs: `submit(run, *arguments)`, `map_array(run, ...)`, and `batch()` as with any executor of submitit.
    Run folders are created as `folder`/<run_name>, unless the arguments name one (run_dir=...).
    update_parameters(account="x", time="02:00:00") sets cluster.account and cluster.time for later submissions. The
    submitted function (`run` or any other) is called at once in this process and returns a run's arguments."""

    job_class = RunJob

    def __init__(self, folder: Path | str = "runs"):
        super().__init__(folder)

    @classmethod
    def affinity(cls) -> int:
        """Never selected by an AutoExecutor without a cluster: it cannot run arbitrary functions."""
        return -1 if shutil.which("sbatch") is None else 0

    def _internal_process_submissions(self, delayed_submissions: Sequence[DelayedSubmission]) -> list[Job[Any]]:
        """Check all, then submit all or none. ConfigError, SlurmError."""
        runs = [self._arguments(each.function(*each.args, **each.kwargs)) for each in delayed_submissions]
        return list(submit_all(runs))

    def _arguments(self, given: Sequence[str]) -> list[str]:
        arguments = [
            word for name, value in self.parameters.items() for word in _as_arguments(f"cluster.{name}", value)
        ]
        if not any(word.lstrip("+").startswith("cluster=") for word in given):
            arguments.insert(0, "+cluster=slurm")
        arguments += given
        config = None if any(word.startswith("run_dir=") for word in given) else read(arguments).config
        return arguments if config is None else [*arguments, f"run_dir={self.folder / config.run_name}"]


def _as_arguments(key: str, value: Any) -> Iterator[str]:
    """A Python value in command-line syntax, in which names inside a mapping are not quoted."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _as_arguments(f"{key}.{name}", inner)
    else:
        yield f"{key}={json.dumps(value)}"


def submit_all(runs: Sequence[Sequence[str]]) -> list[RunJob]:
    """Check all runs, then submit each unfinished run. ConfigError with the problems of all; SlurmError if Slurm
    refuses one, after the earlier ones were cancelled."""
    prepared, problems = [], []
    for arguments in runs:
        try:
            prepared.append(prepare(arguments))
        except ConfigError as error:
            problems += error.problems
    problems += _clashes([config for config, *_ in prepared])
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    jobs: list[RunJob] = []
    for config, layout, _, state, _ in prepared:
        if state.kind == "finished":
            jobs.append(RunJob.of_run(state.run_dir))
            continue
        try:
            jobs.append(RunJob(state.run_dir, str(submit(config, layout, state.arguments)[0][0])))
        except (ConfigError, slurm.SlurmError, OSError):
            for job in jobs:
                job.cancel(check=False)
            raise
    return jobs


def _clashes(configs: Sequence[Config]) -> list[str]:
    """Problems of submitting these runs together."""
    not_slurm = {config.cluster.name for config in configs} - {"slurm"}
    dry = any(config.dry_run for config in configs)
    folders = Counter(config.run_dir for config in configs)
    return [
        *(f"cluster.name: {name} runs on this machine; a submission needs +cluster=slurm" for name in not_slurm),
        *(["dry_run: a dry run cannot be submitted"] if dry else []),
        *(f"run_dir: {n} runs would use {folder}; give each run its own" for folder, n in folders.items() if n > 1),
    ]
