"""If jobs may not be requeued, a run continues in the next link of a chain."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.jobs import COMPLETED, FAILED, Run, digest, launch, show, submit, wait_state, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CHAIN = ["cluster.after=chain", "max_steps=80"]


def links_of(run: Run) -> list[int]:
    jobs: list[int] = json.loads((run.dir / "slurm" / "submitted.json").read_text())["jobs"]
    return jobs


def stop(run: Run, job: int) -> None:
    """Tell the job that its time is nearly over, as Slurm does, once it has itself trained two steps."""
    told = run.dir / "slurm" / f"job-{job}.log"
    wait_until(lambda: told.exists() and told.read_text().count(" INFO step ") >= 2, lambda: run.log)
    run.cluster.run("scancel", "--signal=USR1", str(job))


def test_a_chain_runs_three_links_and_may_end_early(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    run = Run(cluster, tmp_path, *tiny, *CHAIN, "cluster.num_links=5")
    first, second, third, fourth, fifth = links_of(run)
    assert show(cluster, second)["Dependency"] == f"afterany:{first}(unfulfilled)"
    assert show(cluster, first)["Requeue"] == "0"
    stop(run, first)
    stop(run, second)
    run.tell(pace=0)
    assert wait_state(cluster, run.dir, third, [COMPLETED]) == COMPLETED
    # The link that finished the run removes the rest of the chain from the queue.
    assert {show(cluster, job)["JobState"] for job in (fourth, fifth)} == {"CANCELLED"}
    ends = re.findall(r"attempt (\d) ended \((\w+)\)", run.log)
    assert ends == [("1", "requeue"), ("2", "requeue"), ("3", "done")]
    whole = Run(cluster, make(tmp_path / "whole"), *tiny, "max_steps=80", pace=0)
    whole.wait_end()
    assert digest(run.dir) == digest(whole.dir)


def test_a_chain_ends_when_the_run_does_not_continue(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    """scancel on the running link ends the chain; a run stopped in its last link can be launched again."""
    run = Run(cluster, tmp_path, *tiny, *CHAIN, "cluster.num_links=2")
    first, second = links_of(run)
    run.wait_step(1)
    refused = launch(cluster, run.dir, *run.words)
    assert refused.returncode == 2
    assert f"job {first}" in refused.stderr
    cluster.run("scancel", str(first))
    wait_state(cluster, run.dir, first, ["CANCELLED"])
    wait_state(cluster, run.dir, second, ["CANCELLED", COMPLETED])
    assert "attempt 2" not in run.log
    only = submit(cluster, run.dir, *run.words, "cluster.num_links=1")
    stop(run, only)
    wait_state(cluster, run.dir, only, [FAILED])
    assert "this was the last job of the chain" in run.log
    run.tell(pace=0)
    last = submit(cluster, run.dir, *run.words, "cluster.num_links=1")
    wait_state(cluster, run.dir, last, [COMPLETED])


def test_links_wait_for_all_components_of_the_link_before(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    """The dependency is on the leader of a heterogeneous job, and holds every component back."""
    hetjob = "cluster.components={train: {roles: [controller, trainer], ranks_per_node: 1}, cpu: {roles: [reward]}}"
    layout = ["layout=colocated", "layout.trainer.num_ranks=1", "layout.reward={num_ranks:1,colocate_with:null}"]
    run = Run(cluster, tmp_path, *tiny, *layout, hetjob, *CHAIN, "cluster.num_links=2")
    first, second = links_of(run)
    components = cluster.run("scontrol", "--oneliner", "show", "job", str(second)).splitlines()
    assert len(components) == 2
    assert all("JobState=PENDING" in line for line in components)
    assert f"Dependency=afterany:{first}" in components[0]
    stop(run, first)
    run.tell(pace=0)
    wait_state(cluster, run.dir, second, [COMPLETED])


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder
