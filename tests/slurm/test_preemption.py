"""After a preemption, a lost node or the time limit the job continues by itself, with the same weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hpcrl.report.attempt_history import histories
from hpcrl.report.run_files import RunFiles
from tests.slurm.jobs import Run, digest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SAVE_EVERY = 4


def losses(log: str) -> list[tuple[int, int]]:
    """(last step logged before, or -1; step resumed from) of every start that resumed."""
    starts = re.split(r"rank 0 INFO resumed from step_", log)
    last = [max(map(int, re.findall(r" rank 0 INFO step (\d+)/", text)), default=-1) for text in starts]
    return [(before, int(text[:6])) for before, text in zip(last, starts[1:], strict=False)]


def test_preemptions_and_a_lost_node_change_no_bit(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    """Prompts are images, which no checkpoint lacks."""
    words = [*tiny, "model.path=null", "model.tiny.architecture=qwen2_5_vl", "data.train=task:shapes"]
    words += ["layout=colocated", "layout.trainer.num_ranks=1", f"save_every={SAVE_EVERY}", "max_steps=40"]
    words += ["cluster.max_restarts=0"]  # none of these may count as a crash
    (tmp_path / "a").mkdir()
    run = Run(cluster, tmp_path / "a", *words)
    run.wait_step(3)
    run.tell(pace=2)  # Slurm may look for nodes to preempt only after some seconds, in which the run must not end
    run.preempt(1)
    run.tell(pace=0.1)
    run.wait_said("resumed from", 1)
    run.wait_step(14)
    run.tell(pace=2)
    node = re.search(r"NodeList=(n\d)", cluster.run("scontrol", "--oneliner", "show", "job", str(run.job)))
    assert node is not None
    for state in ("drain", "down"):  # drained, it stays away when its slurmd, which has not gone, reports
        cluster.run("scontrol", "update", f"nodename={node[1]}", f"state={state}", "reason=test")
    run.wait_restart(2)
    cluster.run("scontrol", "update", f"nodename={node[1]}", "state=resume")
    run.preempt(3)  # before its first step, or soon after it
    run.tell(pace=0)
    said = run.wait_end()

    assert run.restarts == 3
    noticed, unnoticed, *_ = losses(said)
    assert noticed[0] == noticed[1]
    assert unnoticed[0] - unnoticed[1] <= SAVE_EVERY
    told = histories(RunFiles(run.dir))
    assert [told[0].end, told[1].end, told[-1].end] == ["preempted", "node failed", "finished"]
    assert told[0].lost_steps == () and told[1].resumed_from == told[0].last_step

    (tmp_path / "b").mkdir()
    undisturbed = Run(cluster, tmp_path / "b", *words, pace=0)
    undisturbed.wait_end()
    assert digest(run.dir) == digest(undisturbed.dir)


def one_minute(cluster: Any, folder: Path, tiny: list[str]) -> Run:
    """A run that needs several jobs. Every 30 s Slurm checks whether the warning is due within 30 s, so it comes 20 to
    50 s after the start."""
    words = [*tiny, "cluster.time=00:01:00", "cluster.signal_lead_s=10", "cluster.max_restarts=0", "max_steps=300"]
    return Run(cluster, folder, *words, "reward.default.timeout_s=500", f"save_every={SAVE_EVERY}", pace=0.3)


def test_the_warning_before_the_time_limit_saves_a_checkpoint(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    run = one_minute(cluster, tmp_path, tiny)
    run.wait_restart(1)
    run.tell(pace=0)
    said = run.wait_end()
    assert all(before == resumed for before, resumed in losses(said)), "no step is lost"
    assert re.search(r"attempt 1 ended \(requeue\)", said)


@pytest.mark.soak
def test_a_run_resumes_after_reaching_the_time_limit_twice(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    run = one_minute(cluster, tmp_path, tiny)
    run.wait_restart(1)
    run.wait_said("resumed from", 1)
    restarts = run.restarts  # more than one if a loaded machine had no checkpoint before the first warning
    run.tell(pace=400)  # a step longer than the job
    run.wait_restart(restarts + 1)
    run.tell(pace=0)
    said = run.wait_end()
    noticed, unnoticed, *_ = losses(said)
    assert noticed[0] == noticed[1]
    assert unnoticed[0] - unnoticed[1] <= SAVE_EVERY and unnoticed[1] >= noticed[1]
    assert "DUE TO TIME LIMIT" in said
    assert re.search(r"attempt 1 ended \(requeue\)", said)
    assert re.search(rf"attempt {restarts + 1} ended \(lost\): resumes", said)
