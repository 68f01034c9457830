"""A site with enforced accounting: its refusals, where account and qos are passed, and accounting records of jobs that
scontrol has forgotten."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from hpcrl.cluster import slurm
from hpcrl.system.exit_codes import ExitCode
from tests.slurm.jobs import Run, launch, processes, says, submit, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

HETJOB = [
    *("layout=disaggregated", "layout.trainer.num_ranks=1", "layout.generator.num_ranks=2"),
    "layout.reward.num_ranks=1",
    "cluster.components={train: {roles: [controller, trainer], ranks_per_node: 1},"
    " gen: {roles: [generator], ranks_per_node: 1}, cpu: {roles: [reward]}}",
]
ENDLESS = ["max_steps=100000", "save_every=10000"]


@pytest.fixture(scope="module")
def cluster(one_machine: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Cluster with accounts whose scontrol soon forgets a job. The account physics is this user's first, its qos fast
    refuses jobs of more than an hour; the account strict lets those of more than ten minutes wait for ever."""
    if missing := [name for name in ("slurmdbd", "mariadbd") if one_machine.find_program(name) is None]:
        pytest.skip(f"no {' and no '.join(missing)}; apt-get install slurmdbd mariadb-server-core mariadb-client-core")
    with one_machine.Cluster(tmp_path_factory.mktemp("slurm"), accounting=True, min_job_age_s=2) as running:
        user = running.run("id", "-un").strip()
        for words in (
            ["modify", "qos", "fast", "set", "MaxWall=01:00:00", "Flags=DenyOnLimit"],
            ["add", "account", "strict"],
            ["add", "user", user, "account=strict", "MaxWall=00:10:00"],
            ["modify", "user", user, "set", "DefaultAccount=physics"],
        ):
            running.run("sacctmgr", "-i", *words)
        yield running


@pytest.fixture(autouse=True)
def asked(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Slurm commands of this process use this cluster. Cancels jobs left by a failed test."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    yield
    cluster.run("scancel", "--partition=low,high,solo", check=False)


def accounted(cluster: Any, job: int, *fields: str) -> list[list[str]]:
    """A job's accounting record; for a heterogeneous job a line for each component."""
    text = cluster.run("sacct", "-n", "-X", "-P", "-j", str(job), "-o", ",".join(fields))
    return [line.split("|") for line in text.splitlines()]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("cluster.account=chemistry", "Invalid account or account/partition combination specified"),
        ("cluster.qos=gold", "Invalid qos specification"),
        ("cluster.account=strict cluster.qos=fast", "Invalid qos specification"),
        ("cluster.qos=fast cluster.time=02:00:00", "Job violates accounting/QOS policy"),
    ],
)
def test_a_refused_job_is_one_line(cluster: Any, tmp_path: Path, tiny: list[str], words: str, reason: str) -> None:
    done = launch(cluster, tmp_path / "run", *tiny, "max_steps=1", *words.split())
    assert done.returncode == ExitCode.BAD_INPUT, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1 and reason in done.stderr and "Slurm refuses the job" in done.stderr
    assert not cluster.run("squeue", "-h").strip() and not (tmp_path / "run" / "slurm" / "submitted.json").exists()


def test_every_component_has_the_configured_account_and_qos(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    words = [*tiny, *HETJOB, "max_steps=2", "cluster.account=physics", "cluster.qos=fast"]
    job = submit(cluster, tmp_path, *words)
    shown = cluster.run("scontrol", "--oneliner", "show", "job", str(job))
    assert re.findall(r" Account=(\S+)", shown) == ["physics"] * 3 and re.findall(r" QOS=(\S+)", shown) == ["fast"] * 3
    assert slurm.find_accounted(job) is None, "it lives"
    wait_until(lambda: slurm.find_accounted(job) is not None, lambda: str(accounted(cluster, job, "State")))
    kept = [[f"{job}+{i}", "physics", "fast", "COMPLETED"] for i in range(3)]
    assert accounted(cluster, job, "JobID", "Account", "QOS", "State") == kept
    assert slurm.find_accounted(job) == slurm.Job(job, "COMPLETED", 0, False, "", None)
    assert slurm.find_accounted(job + 100) is None
    says(cluster, tmp_path, "state    finished: trained 2 steps")


def test_accounting_knows_the_states_of_jobs_that_scontrol_forgot(
    cluster: Any, tmp_path: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for a limit, running, requeued, killed, cancelled; accounting uses the same state names as scontrol."""
    pytest.importorskip("submitit")
    from hpcrl.launch.executor import RunJob, RunWatcher

    monkeypatch.setattr(RunJob, "watcher", RunWatcher(delay_s=10))  # it knows jobs of other clusters by these numbers
    waiting = tmp_path / "waiting"
    never = submit(cluster, waiting, *tiny, "max_steps=1", "cluster.account=strict", "cluster.qos=normal")
    run = Run(cluster, tmp_path, *tiny, *ENDLESS, pace=0.1)
    says(cluster, waiting, f"state    queued: job {never} waits (AssocMaxWallDurationPerJobLimit)")
    cluster.run("scancel", str(never))
    run.wait_step(1)
    says(cluster, run.dir, f"state    running: job {run.job}, attempt 1")
    cluster.run("scontrol", "requeue", str(run.job))
    says(cluster, run.dir, f"state    requeued: job {run.job} waits")
    run.wait_restart(1)  # not at once: Slurm ends a step that starts while the one before is still being revoked
    says(cluster, run.dir, f"state    running: job {run.job}, attempt 2")
    job = RunJob.of_run(run.dir)
    # Accounting records a restart a moment later than the controller.
    wait_until(lambda: not job.done(force_check=True) and job.state == "RUNNING", lambda: job.state)

    for process in sorted(processes(cluster, run.job), key=lambda process: process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with another process
            process.kill()  # the batch script first: nothing records the end
    wait_until(lambda: not cluster.run("squeue", "-h").strip(), lambda: cluster.run("squeue"))
    wait_until(lambda: slurm.find_job(run.job) is None, lambda: cluster.run("scontrol", "show", "job"))
    assert slurm.find_job(never) is None, "scontrol has forgotten both"
    wait_until(lambda: slurm.find_accounted(run.job) is not None, lambda: str(accounted(cluster, run.job, "State")))
    assert accounted(cluster, run.job, "State") == [["FAILED"]], "of its two runs the last"
    assert accounted(cluster, never, "State")[0][0].startswith("CANCELLED by ")
    says(cluster, run.dir, f"state    lost: attempt 2 ended without a report, job {run.job} is failed;")
    says(cluster, waiting, f"state    never started: job {never} is cancelled")
    assert job.done(force_check=True) and job.state == "FAILED"
    assert RunJob.of_run(waiting).state == "CANCELLED"
