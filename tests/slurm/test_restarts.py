"""What goes wrong in a job: what may pass is tried again, what may not ends the run, and nothing is left behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hpcrl.exitcodes import ExitCode
from hpcrl.files import committed_step, step_name
from hpcrl.rundir import OWNERS
from tests.slurm.jobs import CANCELLED, FAILED, Run, ranks, show, step_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

COMPONENTS = (
    "cluster.components={train: {roles: [controller, trainer]}, cpu: {roles: [%s], ranks_per_node: 1}}",
    "layout=colocated",
    "layout.trainer.num_ranks=1",
)


def test_crashes_count_only_until_the_next_checkpoint(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    run = Run(cluster, tmp_path, *tiny, "cluster.max_restarts=1", "save_every=2", "max_steps=50", pace=0, die_at=4)
    for number in (1, 2, 3):
        run.wait_restart(number)
    run.tell(die_at=1)
    said = run.wait_end(FAILED)
    print(said)
    assert said.count("crash 1 of at most 1 without a new checkpoint") >= 3
    assert re.search(
        r"attempt \d+ ended \(rank_killed\): crash 2 without a new checkpoint, cluster.max_restarts is 1", said, re.I
    )
    assert int(show(cluster, run.job)["ExitCode"].split(":")[0]) == ExitCode.RANK_KILLED
    # A person looks at it, mends it and submits it again.
    run.tell(die_at=None)
    again = Run(cluster, tmp_path, *tiny, "cluster.max_restarts=1", "save_every=2", "max_steps=50", pace=0)
    again.wait_end()


def test_a_hang_is_named_and_the_job_requeued(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    words = [
        "layout=colocated",
        "layout.trainer.num_ranks=1",
        "layout.env.num_ranks=1",
        "layout.env.colocate_with=null",
    ]
    words += ["env=scripted", "env.name=class", "env.class_path=tests.slurm.user_code:SleepyEnv"]
    words += [f"+env.options.folder={tmp_path}", "timeouts.command_s=8", "save_every=2", "max_steps=20"]
    run = Run(cluster, tmp_path, *tiny, *words)
    run.wait_step(3)
    run.tell(sleep="")
    run.wait_restart(1)
    said = run.wait_end()
    print(said)
    assert re.search(r"rank 2 \(env\) on \S+ did not answer within 8 s: \d+ responses wait there", said)
    assert re.search(r"attempt 1 ended \(deadline\): crash 1", said, re.I)


def test_a_damaged_checkpoint_is_passed_over(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    run = Run(cluster, tmp_path, *tiny, "save_every=3", "max_steps=20", pace=0.3)
    run.wait_step(7)
    damaged = committed_step(run.dir)
    folder = run.dir / "checkpoints" / step_name(damaged)
    largest = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    ranks(cluster, run.job)[0].kill()
    run.tell(pace=0)
    run.wait_restart(1)
    said = run.wait_end()
    print(said)
    assert f"resumed from {step_name(damaged - 3)}" in said
    assert step_name(damaged) in said.split("crash 1")[1]


def test_a_lost_reward_rank_is_survived(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    words = [COMPONENTS[0] % "reward", *COMPONENTS[1:], "layout.reward.num_ranks=2", "layout.reward.colocate_with=null"]
    run = Run(cluster, tmp_path, *tiny, *words, "layout.reward.min_ranks=1", "deterministic=false", "max_steps=40")
    run.wait_step(3)
    ranks(cluster, run.job)[3].kill()
    run.wait_said("the run goes on without it")
    before = step_of(run.dir)
    said = run.wait_end()
    print(said)
    assert re.search(r"rank 3 \(reward\) .*SIGKILL.*the run goes on without it", said)
    assert run.restarts == 0 and before < 40 == step_of(run.dir)


def test_a_cancelled_job_leaves_no_process_and_resumes(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    words = [*tiny, "layout=colocated", "layout.trainer.num_ranks=1", "save_every=100", "max_steps=30"]
    run = Run(cluster, tmp_path, *words)
    run.wait_step(3)
    assert len(ranks(cluster, run.job)) == 2
    cluster.run("scancel", str(run.job))
    said = run.wait_end(CANCELLED)
    print(said)
    assert run.restarts == 0
    saved = committed_step(run.dir)
    assert saved == step_of(run.dir) >= 3
    again = Run(cluster, tmp_path, *words, pace=0)
    assert f"resumed from {step_name(saved)}" in again.wait_end()


def test_a_superseded_attempt_commits_nothing(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    run = Run(cluster, tmp_path, *tiny, "save_every=1", "max_steps=60")
    run.wait_step(3)
    (run.dir / OWNERS / "0002").write_text((run.dir / OWNERS / "0001").read_text())
    committed = committed_step(run.dir)
    said = run.wait_end(FAILED)
    print(said)
    assert committed_step(run.dir) <= committed + 1
    assert int(show(cluster, run.job)["ExitCode"].split(":")[0]) == ExitCode.SUPERSEDED
    assert run.restarts == 0 and "attempt 2 has taken the run over" in said
