"""Submit runs as a user would, watch their jobs, and count their remaining processes."""

from __future__ import annotations

import hashlib
import re
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import psutil

from hpcrl.commands.status import main as status_main
from hpcrl.launch.__main__ import main as launch_main
from hpcrl.metrics.log import read_metrics
from tests import in_process
from tests.conftest import ROOT
from tests.e2e.program import by_rank

RUNNING, PENDING, COMPLETED, FAILED, CANCELLED = "RUNNING", "PENDING", "COMPLETED", "FAILED", "CANCELLED"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY")


def launch(cluster: Any, run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`python -m hpcrl.launch +cluster=slurm run_dir=... WORDS` from this cluster's login node."""
    environ = {**cluster.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return in_process.run(launch_main, "+cluster=slurm", f"run_dir={run_dir}", *words, at=Path.cwd(), environ=environ)


def submit(cluster: Any, run_dir: Path, *words: str) -> int:
    """The (leader's) job id of a submitted run."""
    done = launch(cluster, run_dir, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    submitted = re.search(r"^job (\d+) is submitted$", done.stdout, re.MULTILINE)
    assert submitted is not None, done.stdout
    return int(submitted[1])


def status(cluster: Any, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`python -m hpcrl status WORDS` from this cluster's login node."""
    return in_process.run(status_main, *words, at=cwd, environ=cluster.environ)


def says(cluster: Any, run: str | Path, *texts: str, timeout_s: float = 60.0) -> str:
    """The run's status once it contains all the texts."""
    said = ""

    def all_said() -> bool:
        nonlocal said
        done = status(cluster, str(run))
        assert done.returncode == 0, done.stderr
        said = done.stdout
        return all(text in said for text in texts)

    wait_until(all_said, lambda: f"{texts} not in\n{said}", timeout_s)
    return said


def show(cluster: Any, job: int) -> dict[str, str]:
    """The output of `scontrol show job` for a job; for a heterogeneous job, for its leader."""
    # Slurm answers late while the ranks of 64 nodes start on two cores.
    line = cluster.run("scontrol", "--oneliner", "show", "job", str(job), timeout_s=200.0).splitlines()[0]
    return dict(re.findall(r"(\w+)=(\S*)", line))


def log(run_dir: Path) -> str:
    """The output of all jobs of a run."""
    return "".join(path.read_text() for path in sorted((run_dir / "slurm").glob("job-*.log")))


def wait_until(happened: Callable[[], bool], tell: Callable[[], str], timeout_s: float = 200.0) -> None:
    """Return when the condition holds; AssertionError with the result of `tell` if it does not in time."""
    began = time.monotonic()
    while not happened():
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"not within {timeout_s:g} s:\n{tell()}"
        time.sleep(min(max(0.05, waited_s / 20), 0.5))  # most conditions start a command of Slurm's


def wait_state(cluster: Any, run_dir: Path, job: int, states: Collection[str], timeout_s: float = 200.0) -> str:
    """The job's state once it is one of `states`. Any other final state is an immediate error."""
    state = ""

    def reached() -> bool:
        nonlocal state
        state = show(cluster, job)["JobState"]
        assert state in states or state not in ENDED, f"job {job} is {state}:\n{log(run_dir)}"
        return state in states

    wait_until(reached, lambda: f"job {job} is {state}, waited for {states}\n{log(run_dir)}", timeout_s)
    return state


def step_of(run_dir: Path) -> int:
    """The last step that a run has logged, -1 before the first."""
    return max((int(row["step"]) for row in read_metrics(run_dir)), default=-1)


def wait_step(cluster: Any, run_dir: Path, job: int, step: int, timeout_s: float = 200.0) -> None:
    """Return when the run has logged `step`; AssertionError when its job ends before."""

    def reached() -> bool:
        done = step_of(run_dir) >= step
        assert done or show(cluster, job)["JobState"] not in ENDED, f"job {job} ended:\n{log(run_dir)}"
        return done

    wait_until(reached, lambda: f"run is at step {step_of(run_dir)} of {step}\n{log(run_dir)}", timeout_s)


def processes(cluster: Any, job: int | None = None) -> dict[psutil.Process, dict[str, str]]:
    """Process -> environment, for all running processes of this cluster's jobs (or of one job)."""
    found = {}
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            ours = environ.get("SLURM_CONF") == str(cluster.conf) and "SLURM_JOB_ID" in environ
            wanted = job is None or str(job) in (environ.get("SLURM_HET_JOB_ID"), environ.get("SLURM_JOB_ID"))
            if ours and wanted and process.status() != psutil.STATUS_ZOMBIE:
                found[process] = environ
        except psutil.Error:  # ended meanwhile, or of another user
            continue
    return found


def ranks(cluster: Any, job: int) -> dict[int, psutil.Process]:
    """Rank -> its process, for running ranks."""
    return by_rank(processes(cluster, job))


def wait_gone(cluster: Any, job: int, timeout_s: float = 20.0) -> None:
    """Return when no process of the job is left."""
    left: dict[psutil.Process, dict[str, str]] = {}

    def gone() -> bool:
        nonlocal left
        left = processes(cluster, job)
        return not left

    wait_until(gone, lambda: f"still there: {list(left)}", timeout_s)


def digest(run_dir: Path) -> str:
    """SHA-256 of the final weights, as exported."""
    weights = sorted((run_dir / "hf").glob("*.safetensors"))
    assert weights, f"{run_dir} has no exported weights:\n{log(run_dir)}"
    return hashlib.sha256(b"".join(path.read_bytes() for path in weights)).hexdigest()


class Run:
    """A submitted run whose reward is controlled by the test."""

    def __init__(self, cluster: Any, folder: Path, *words: str, pace: float = 0.1, **files: object):
        self.cluster, self.folder, self.dir = cluster, folder, folder / "run"
        function = f"reward.default.name=function reward.default.function={ROOT}/tests/slurm/user_code.py:reward"
        self.words = [*words, *function.split(), f"+reward.default.options.folder={folder}"]
        self.tell(pace=pace, **files)
        self.job = submit(cluster, self.dir, *self.words)

    def tell(self, **files: object) -> None:
        """Write the files that the user's code reads; None removes the file."""
        for name, content in files.items():
            if content is None:
                (self.folder / name).unlink(missing_ok=True)
            else:
                (self.folder / name).write_text(str(content))

    @property
    def log(self) -> str:
        return log(self.dir)

    @property
    def restarts(self) -> int:
        """How often the job was requeued."""
        return int(show(self.cluster, self.job)["Restarts"])

    def wait_step(self, step: int) -> None:
        """Return when the run has logged the step."""
        wait_step(self.cluster, self.dir, self.job, step)

    def wait_said(self, text: str, times: int = 1, timeout_s: float = 200.0) -> None:
        """Return when the job's log contains this text so many times."""
        wait_until(
            lambda: self.log.count(text) >= times, lambda: f"{text} not said {times} times:\n{self.log}", timeout_s
        )

    def wait_restart(self, number: int, timeout_s: float = 200.0) -> None:
        """Return when the job runs for the `number`-th time after its first, without the seconds that Slurm waits."""
        wait_until(lambda: self.restarts >= number, lambda: f"no restart {number}:\n{self.log}", timeout_s)
        wait_state(self.cluster, self.dir, self.job, [PENDING, RUNNING], timeout_s)
        self.cluster.run(
            "scontrol", "update", f"jobid={self.job}", "StartTime=now+2", check=False
        )  # it may run already
        wait_state(self.cluster, self.dir, self.job, [RUNNING], timeout_s)

    def wait_end(self, state: str = COMPLETED, timeout_s: float = 200.0) -> str:
        """The job's log once it has ended in this state and left no process."""
        wait_state(self.cluster, self.dir, self.job, [state], timeout_s)
        wait_gone(self.cluster, self.job)
        return self.log

    def preempt(self, number: int) -> None:
        """Let a job of a higher partition take all nodes for a moment; returns when the run's job runs again, for the
        `number`-th time after its first."""
        self.cluster.run(
            "sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
        )
        self.wait_restart(number)
