"""Failures in a job: temporary ones are retried, permanent ones end the run, and nothing is left behind."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrl.run_folder import OWNERS
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import committed_step, step_name, steps_in
from hpcrl.system.log import HEADER
from tests.conftest import ROOT
from tests.slurm.jobs import CANCELLED, FAILED, Run, ranks, show, step_of, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMPONENTS = (
    "cluster.components={train: {roles: [controller, trainer]}, cpu: {roles: [%s], ranks_per_node: 1}}",
    "layout=colocated",
    "layout.trainer.num_ranks=1",
)


@pytest.mark.soak
def test_crashes_count_only_until_the_next_checkpoint(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    words = [*tiny, "cluster.max_restarts=1", "save_every=2", "max_steps=200"]
    run = Run(cluster, tmp_path, *words, commits=1)
    for number in (1, 2, 3):
        run.wait_restart(number)
    run.tell(commits=0)
    said = run.wait_end(FAILED)
    assert said.count("crash 1 of at most 1 without a new checkpoint") >= 3
    assert re.search(
        r"attempt \d+ ended \(rank_killed\): crash 2 without a new checkpoint, cluster.max_restarts is 1", said
    )
    assert int(show(cluster, run.job)["ExitCode"].split(":")[0]) == ExitCode.RANK_KILLED
    # A user examines the run, repairs it and submits it again.
    saved = committed_step(run.dir)
    again = Run(cluster, tmp_path, *words, pace=0, commits=None)
    assert f"resumed from {step_name(saved)}" in again.wait_end().split("does not resume")[1]


def test_a_hang_is_named_and_the_job_is_requeued(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    words = [
        "layout=colocated",
        "layout.trainer.num_ranks=1",
        "layout.env.num_ranks=1",
        "layout.env.colocate_with=null",
    ]
    words += ["env=scripted", "timeouts.command_s=15", "save_every=2", "max_steps=20"]
    run = Run(cluster, tmp_path, *tiny, *words)
    run.wait_step(3)
    ranks(cluster, run.job)[2].suspend()
    run.wait_restart(1)
    said = run.wait_end()
    # Rank 0 may reach its own deadline while the agent, which has killed the rank, imports what it reports with.
    found = r"is lost: .* sent no heartbeat for \d+ s|did not answer within \d+ s"
    assert re.search(rf"rank 2 \(env\) on \S+ ({found})", said)
    assert re.search(r"attempt 1 ended \(deadline\): crash 1", said)
    assert " rank 0 INFO step 20/20 " in said
    command = [sys.executable, "-m", "hpcrl", "logs", str(run.dir)]
    merged = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert re.search(r" agent WARNING rank 2 is lost: .* sent no heartbeat for \d+ s", merged)
    headers = [line for line in merged.splitlines() if HEADER.match(line)]
    assert len(headers) == len(set(headers)), "what the job's log repeats comes once"
    assert {"launch", "agent", "rank 0", "rank 1", "rank 2"} == {found["who"] for found in HEADER.finditer(merged)}
    in_order = (
        " launch INFO attempt 1 in job ",
        " rank 2 INFO env ready",
        "the run ends",
        " agent ERROR rank 2 (env) ",
    )
    in_order += (
        " agent ERROR rank 2 (env) ",
        " launch ERROR attempt 1 ended",
        " launch INFO attempt 2 in job ",
        " rank 0 INFO step 20/20 ",
    )
    places = [next(i for i, line in enumerate(headers) if text in line) for text in in_order]
    assert places == sorted(places), merged


def test_a_job_suspended_for_long_continues(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    words = ["layout=colocated", "layout.trainer.num_ranks=2", "timeouts.command_s=16", "max_steps=30"]
    run = Run(cluster, tmp_path, *tiny, *words)
    run.wait_step(3)
    run.tell(pace=1)  # it must not end before
    cluster.run("scontrol", "suspend", str(run.job))
    time.sleep(20)
    before = step_of(run.dir)
    cluster.run("scontrol", "resume", str(run.job))
    run.tell(pace=0)
    assert "attempt 1 ended (done)" in run.wait_end()
    assert run.restarts == 0 and before < 30 == step_of(run.dir)


@pytest.mark.soak
def test_a_job_step_that_lost_its_daemon_is_killed(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    """slurmstepd is killed, for example for lack of memory: srun does not notice and would wait forever."""
    words = ["timeouts.command_s=20", "timeouts.grace_s=1", "save_every=2", "max_steps=40"]
    run = Run(cluster, tmp_path, *(word for word in tiny if "grace_s" not in word), *words)
    run.wait_step(3)
    rank = ranks(cluster, run.job)[0]
    daemon = next(
        process for process in rank.parents() if "slurmstepd" in " ".join([process.name(), *process.cmdline()])
    )
    daemon.kill()
    run.wait_restart(1)
    run.tell(pace=0)
    said = run.wait_end()
    assert "the first node's agent has ended or hangs; killing the job step" in said
    # Rank 0 can leave a message if it printed something to the lost daemon and had the time.
    assert re.search(r"attempt 1 ended \((lost|rank_killed)\): crash 1", said)


def test_a_damaged_checkpoint_is_skipped(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    run = Run(cluster, tmp_path, *tiny, "save_every=3", "max_steps=40")
    wait_until(lambda: committed_step(run.dir) >= 6, lambda: f"no two checkpoints:\n{run.log}")
    run.tell(pace=1)  # it must not end before
    controller = ranks(cluster, run.job)[0]
    controller.suspend()  # it commits nothing while one is damaged
    *_, before, damaged = steps_in(run.dir / "checkpoints")
    largest = max((run.dir / "checkpoints" / step_name(damaged)).iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    controller.kill()
    run.tell(pace=0)
    run.wait_restart(1)
    said = run.wait_end()
    assert re.search(rf"checkpoints: .*{step_name(damaged)}", said), said
    assert f"resumed from {step_name(before)}" in said, said


@pytest.mark.parametrize(("place", "resumed"), [("shards_written:2", 2), ("renamed:2", 4)])
def test_a_crash_in_a_save_is_survived(cluster: Any, tmp_path: Path, tiny: list[str], place: str, resumed: int) -> None:
    """Before the second checkpoint is committed the run resumes from the first, afterwards from the second."""
    dies = f"cluster.prologue='[ -n \"$SLURM_RESTART_COUNT\" ] || export HPCRL_FAILPOINT={place}'"
    run = Run(cluster, tmp_path, *tiny, dies, "save_every=2", "max_steps=6")
    run.wait_restart(1)
    said = run.wait_end()
    assert re.search(r"attempt 1 ended \((rank_killed|not_saved)\): crash 1", said), said
    assert re.findall(r"resumed from (\w+)", said) == [step_name(resumed)]
    assert committed_step(run.dir) == 6 and run.restarts == 1
    assert not [path for path in (run.dir / "checkpoints").iterdir() if path.is_dir() and "step_" not in path.name]


def test_the_loss_of_a_reward_rank_is_survived(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    words = [COMPONENTS[0] % "reward", *COMPONENTS[1:], "layout.reward.num_ranks=2", "layout.reward.colocate_with=null"]
    run = Run(cluster, tmp_path, *tiny, *words, "layout.reward.min_ranks=1", "deterministic=false", "max_steps=40")
    run.wait_step(3)
    run.tell(pace=1)  # it must not end before
    ranks(cluster, run.job)[3].kill()
    run.wait_said("the run continues without it")
    before = step_of(run.dir)
    run.tell(pace=0)
    said = run.wait_end()
    assert re.search(r"rank 3 \(reward\) .*SIGKILL.*the run continues without it", said)
    assert run.restarts == 0 and before < 40 == step_of(run.dir)


def test_a_cancelled_job_leaves_no_process_and_can_be_resumed(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    words = [*tiny, "layout=colocated", "layout.trainer.num_ranks=1", "save_every=100", "max_steps=30"]
    run = Run(cluster, tmp_path, *words)
    run.wait_step(3)
    run.tell(pace=1)  # it must not end before
    assert len(ranks(cluster, run.job)) == 2
    cluster.run("scancel", str(run.job))
    run.wait_end(CANCELLED)
    assert run.restarts == 0
    saved = committed_step(run.dir)
    assert saved == step_of(run.dir) >= 3
    again = Run(cluster, tmp_path, *words, pace=0)
    assert f"resumed from {step_name(saved)}" in again.wait_end()


def test_a_job_step_that_does_not_start_names_the_cause(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    """If a container's image has disappeared, the runtime reports it and exits; a missing Python is bad input."""
    (tmp_path / "image.sif").touch()
    runtime = tmp_path / "apptainer"
    runtime.write_text("#!/bin/sh\necho starting >&2\necho 'FATAL: image.sif: no such file' >&2\nexit 255\n")
    runtime.chmod(0o755)
    words = [*tiny, "cluster.container=apptainer", f"cluster.image={tmp_path}/image.sif", "cluster.max_restarts=1"]
    run = Run(cluster, tmp_path, *words, f"cluster.prologue='export PATH={tmp_path}:$PATH'", "max_steps=1")
    run.wait_restart(1)
    said = run.wait_end(FAILED)
    told = (
        r"ended \(not_started\): the step ended with code 255 before any agent started: FATAL: image.sif: no .* file; "
    )
    assert re.findall(rf"attempt (\d) {told}crash (\d)", said) == [("1", "1"), ("2", "2")]
    runtime.unlink()
    again = Run(cluster, tmp_path, *run.words)
    said = again.wait_end(FAILED)[len(said) :]
    told = r"attempt 3 ended \(bad_input\): .* before any agent started: .*apptainer.*; does not resume by itself"
    assert again.restarts == 0 and re.search(told, said), said


def test_a_superseded_attempt_commits_nothing(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    run = Run(cluster, tmp_path, *tiny, "save_every=1", "max_steps=60")
    run.wait_step(3)
    (run.dir / OWNERS / "0002").write_text((run.dir / OWNERS / "0001").read_text())
    committed = committed_step(run.dir)
    said = run.wait_end(FAILED)
    assert committed_step(run.dir) <= committed + 1
    assert int(show(cluster, run.job)["ExitCode"].split(":")[0]) == ExitCode.SUPERSEDED
    assert run.restarts == 0 and "attempt 2 now owns the run" in said
