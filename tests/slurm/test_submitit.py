"""Runs as submitit jobs, on real Slurm daemons without accounting: submitit's own job would wait for ever here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cluster.slurm import SlurmError
from hpcrl.config import ConfigError
from tests.conftest import ROOT
from tests.slurm.jobs import launch, says, show, wait_until

pytest.importorskip("submitit")
from submitit import AutoExecutor
from submitit.core.utils import FailedJobError, UncompletedJobError

from hpcrl.launch.executor import HpcrlExecutor, RunJob, RunWatcher, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

HETJOB = [
    *(
        "layout=disaggregated",
        "layout.trainer.num_ranks=1",
        "layout.generator.num_ranks=2",
        "layout.reward.num_ranks=1",
    ),
    "cluster.components={train: {roles: [controller, trainer], ranks_per_node: 1},"
    " gen: {roles: [generator], ranks_per_node: 1}, cpu: {roles: [reward]}}",
]
ENDLESS = ["max_steps=100000", "save_every=10000"]


@pytest.fixture
def executor(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HpcrlExecutor]:
    """The executor of this module's cluster; cancels jobs left by a failed test."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    monkeypatch.setattr(RunJob, "watcher", RunWatcher(delay_s=10))  # it knows jobs of other clusters by these numbers
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("SLURM_JOB_ID", "SLURM_HET_JOB_ID", "SBATCH_PARTITION"):
        monkeypatch.delenv(name, raising=False)
    yield HpcrlExecutor(tmp_path)
    cluster.run("scancel", "--partition=low,high,solo", check=False)


def without(words: list[str], key: str) -> list[str]:
    return [word for word in words if not word.startswith(f"{key}=")]


def queue(cluster: Any) -> str:
    return cluster.run("squeue", "-h", "-o", "%i").strip()


def test_a_heterogeneous_job_is_awaited_and_returns_its_result(
    executor: HpcrlExecutor, cluster: Any, tmp_path: Path, tiny: list[str]
) -> None:
    executor.update_parameters(partition="solo", exclude="n4,n3")
    executor.update_parameters(exclude=None)
    job = executor.submit(run, *tiny, *HETJOB, "max_steps=2", "run_name=het")
    assert isinstance(job, RunJob) and job.run_dir == tmp_path / "het"
    shown = cluster.run("scontrol", "--oneliner", "show", "job", job.job_id).splitlines()
    assert len(shown) == 3 and all("Partition=solo" in line for line in shown)
    assert not job.done(force_check=True) and job.state in ("PENDING", "CONFIGURING", "RUNNING")
    result = job.result()
    assert job.done() and job.state == "COMPLETED" and job.exception() is None
    assert (result["exit_code"], result["step"], result["metrics"]["step"]) == (0, 2, 2)
    assert (Path(result["hf"]) / "config.json").exists()
    assert "launch INFO attempt 1" in (job.stdout() or "") and job.stderr() is None
    assert job.results() == [result]

    again = executor.submit(run, *tiny, *HETJOB, "max_steps=2", "run_name=het")  # finished: nothing is submitted
    assert again.job_id == job.job_id and again.result() == result and queue(cluster) == ""


def test_a_failed_run_raises_with_its_reason(executor: HpcrlExecutor, tmp_path: Path, tiny: list[str]) -> None:
    data = tmp_path / "impossible.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"digit {i}", "answer": "no digit"}) + "\n" for i in range(8)))
    # No answer is ever right, so no group has a reward to learn from.
    job = executor.submit(
        run, *without(tiny, "data.train"), f"data.train={data}", "max_steps=2", "rollout.filter_std=true"
    )
    with pytest.raises(FailedJobError, match=r"starved: attempt 1: .*\(job \d+, failed; ") as caught:
        job.result()
    assert "\n" not in str(caught.value) and str(job.exception()) == str(caught.value)


def test_a_run_whose_input_disappeared_raises_with_its_jobs_message(
    executor: HpcrlExecutor, cluster: Any, tmp_path: Path, tiny: list[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(next(Path(word.split("=", 1)[1]) for word in tiny if word.startswith("data.train=")).read_text())
    cluster.run("scontrol", "update", "partition=low", "state=down")
    try:
        job = executor.submit(run, *without(tiny, "data.train"), f"data.train={data}", "max_steps=2")
        data.unlink()
    finally:
        cluster.run("scontrol", "update", "partition=low", "state=up")
    with pytest.raises(FailedJobError, match=rf"{data}.*\(job {job.job_id}, failed; "):
        job.result()


def test_a_cancelled_run_raises_and_another_process_can_wait_for_it(
    executor: HpcrlExecutor, cluster: Any, tmp_path: Path, tiny: list[str]
) -> None:
    job = executor.submit(run, *tiny, *ENDLESS, "run_name=long")
    wait_until((tmp_path / "long" / "metrics.jsonl").exists, lambda: str(job.stdout()))
    other = RunJob.of_run(tmp_path / "long")
    assert (other.job_id, other.state, other.done()) == (job.job_id, "RUNNING", False)
    other.cancel()
    with pytest.raises(UncompletedJobError, match=r"\(job \d+, cancelled; ") as caught:
        job.result()
    assert not isinstance(caught.value, FailedJobError) and job.state == "CANCELLED"


def test_a_chain_is_one_submitit_job(executor: HpcrlExecutor, cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    executor.update_parameters(after="chain", num_links=3)
    job = executor.submit(run, *tiny, "max_steps=1", "run_name=chain")
    assert isinstance(job, RunJob) and job.links[0] == job.job_id and len(job.links) == 3
    assert job.result()["step"] == 1 and job.state == "COMPLETED"
    assert job.done(force_check=True) and queue(cluster) == ""  # the links that were not needed are gone


def test_all_are_submitted_or_none(executor: HpcrlExecutor, cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    def submit(*runs: list[str]) -> None:
        executor.submit_array([partial(run, *tiny, "max_steps=2", *words) for words in runs])

    with pytest.raises(ConfigError) as caught:
        submit(["run_name=a"], ["seed=x"], ["trainer.lr=-1"])
    assert len(caught.value.problems) == 2 and queue(cluster) == "" and not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match=r"run_dir: 2 runs would use .*/b;"):
        submit(["run_name=b"], ["run_name=b"])
    with pytest.raises(SlurmError, match=r"invalid partition.*\(script: .*/d/slurm/job.sbatch\)"):
        submit(["run_name=c"], ["run_name=d", "cluster.partition=nowhere"])
    wait_until(lambda: queue(cluster) == "", lambda: queue(cluster))
    assert show(cluster, int(RunJob.of_run(tmp_path / "c").job_id))["JobState"] == "CANCELLED"


def test_submitit_finds_the_executor_by_name(
    executor: HpcrlExecutor, cluster: Any, tmp_path: Path, tiny: list[str]
) -> None:
    auto = AutoExecutor(tmp_path, cluster="hpcrl")
    with auto.batch():
        first = auto.submit(run, *tiny, "run_name=one", "max_steps=1")
        second = auto.submit(run, *tiny, "run_name=two", "max_steps=1")
    assert first.job_id != second.job_id
    assert [job.result()["step"] for job in (first, second)] == [1, 1]
    assert AutoExecutor.which() == "slurm"  # chosen only by name: it cannot run any other function


def test_a_job_that_slurm_holds_after_a_failed_launch_is_released(
    executor: HpcrlExecutor, cluster: Any, tmp_path: Path, tiny: list[str]
) -> None:
    """The prolog fails on the first node: Slurm drains the node, requeues the job and holds it."""
    broken, prolog = tmp_path / "broken", tmp_path / "prolog.sh"
    prolog.write_text(f"#!/bin/sh\n[ ! -e {broken} ]\n")
    prolog.chmod(0o755)
    with cluster.conf.open("a") as conf:
        conf.write(f"Prolog={prolog}\n")
    cluster.run("scontrol", "reconfigure")
    broken.touch()
    try:
        job = executor.submit(run, *tiny, "max_steps=1")
        says(cluster, job.run_dir, f"held: job {job.job_id} waits (launch_failed_requeued_held)", "scontrol release")
        done = launch(cluster, job.run_dir, *tiny, "max_steps=1")
        assert f"which is held (launch_failed_requeued_held); scontrol release {job.job_id}" in done.stderr
        broken.unlink()
        assert job.result()["step"] == 1, "released by the process that waits for it"
    finally:
        cluster.run("scontrol", "update", "nodename=n[1-4]", "state=resume", check=False)
