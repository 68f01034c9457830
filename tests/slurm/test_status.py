"""Status: the state of a run from its folder and its job, as a pure description and with real jobs in every state."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from hpcrl.cluster.slurm import Job
from hpcrl.commands.status import RunFolder, describe, last_error, line, state
from hpcrl.config import Config
from hpcrl.run_folder import finish_run, record_refusal, record_submission
from tests.conftest import ROOT
from tests.slurm.jobs import COMPLETED, PENDING, Run, says, status, wait_state, wait_until

NOW = 1_800_000_000.0
PENDING_JOB = Job(7, "PENDING", 0, False, "Priority", None)
RUNNING_JOB = Job(7, "RUNNING", 0, False, "None", NOW + 3600)


def make(folder: Path, *, steps: int = 0, step_s: float = 2.0, **owners: dict[str, Any]) -> Path:
    """A run folder of ten steps in a job; owners: `a1={...}` for attempt 1."""
    config = Config.model_validate(
        {"run_name": "mine", "max_steps": 10, "eval_every": 0, "cluster": {"name": "slurm", "signal_lead_s": 10}}
    )
    (folder / "owners").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    for name, owner in owners.items():
        (folder / "owners" / f"{int(name[1:]):04d}").write_text(json.dumps({"since": "then", "host": "h"} | owner))
    rows = [
        {"step": step, "time/step_total": step_s, "critic/rewards/mean": step / 10, "system/tps": 1000.0}
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(folder / "metrics.jsonl", (NOW - 3, NOW - 3))
    return folder


def word(folder: Path, job: Job | None) -> str:
    return state(RunFolder(folder), job).split(":")[0]


def test_every_state_of_a_run_is_described(tmp_path: Path) -> None:
    held = {"job": 7, "restarts": 0}
    queued = tmp_path / "queued"
    (queued / "slurm").mkdir(parents=True)
    record_submission(queued, [7])
    assert state(RunFolder(queued), PENDING_JOB) == "queued: job 7 waits (Priority)"
    assert word(queued, RUNNING_JOB) == "starting"
    assert state(RunFolder(queued), None) == "never started: Slurm lists no job of this run"
    assert state(RunFolder(queued), Job(7, "FAILED", 0, False, "", None)) == "never started: job 7 is failed"
    run = make(tmp_path / "held", a1=held)
    assert word(run, RUNNING_JOB) == "running"
    assert word(run, Job(7, "COMPLETING", 0, False, "", None)) == "ending"
    assert word(run, Job(7, "RUNNING", 1, False, "", None)) == "starting", "requeued, its attempt is not open yet"
    assert word(run, Job(7, "PENDING", 1, False, "BeginTime", None)) == "requeued"
    assert word(run, Job(7, "CANCELLED", 0, False, "", None)) == "lost"
    assert word(run, None) == "lost"
    ended = make(tmp_path / "ended", a1=held | {"ended": "later", "how": "rank_failed", "why": "crash 4"})
    assert state(RunFolder(ended), None).startswith("stopped: attempt 1 ended later (rank_failed): crash 4")
    finish_run(ended, 10, 10, "trained 10 steps")
    assert state(RunFolder(ended), None).startswith("finished: trained 10 steps")


def test_a_run_on_this_machine_is_described(tmp_path: Path) -> None:
    process, host = psutil.Process(), os.uname().nodename
    mine = {"host": host, "pid": process.pid, "process_start": process.create_time()}
    assert word(make(tmp_path / "a", a1=mine), None) == "running"
    assert word(make(tmp_path / "b", a1=mine | {"process_start": 0.0}), None) == "lost", "the number was given again"
    assert word(make(tmp_path / "c", a1=mine | {"host": "elsewhere"}), None) == "unknown"


def test_progress_and_the_time_limit_are_shown(tmp_path: Path) -> None:
    run = make(tmp_path / "run", steps=4, step_s=60.0, a1={"job": 7, "restarts": 0})
    text = describe(run, RUNNING_JOB, NOW)
    assert "step     4 of 10, 3 s ago  reward 0.400  tokens/s 1,000  1 steps/min" in text
    assert "6 min 00 s left, the job's time limit is in 1 h 00 min" in text and "not enough" not in text
    short = Job(7, "RUNNING", 0, False, "", NOW + 130)
    assert "not enough, around step 6 it is requeued and resumes" in describe(run, short, NOW)
    assert "longer than a step" not in describe(run, short, NOW + 300)
    assert "longer than a step" in describe(run, short, NOW + 1000)
    assert "saved    no checkpoint yet" in text
    folder = run / "checkpoints" / "step_000003"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    os.utime(folder / "manifest.json", (NOW - 90, NOW - 90))
    assert "saved    step 3, 1 min 30 s ago\n" in describe(run, None, NOW) + "\n"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "checkpoint/failed": 2.0}\n')
    assert "saved    step 3, 1 min 30 s ago; 2 save(s) failed since" in describe(run, None, NOW)
    folder.rename(folder.with_name("step_000005"))
    assert "failed" not in describe(run, None, NOW), "saved since"
    folder.with_name("step_000005").rename(folder)
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().rpartition('{"step": 5')[0])
    os.utime(run / "metrics.jsonl", (NOW - 3, NOW - 3))
    assert " ".join(line(run, RUNNING_JOB, NOW).split()) == "run running step 4/10 reward 0.400 ETA 6 min 00 s"


def test_a_new_attempt_without_a_step_does_not_count_as_hanging(tmp_path: Path) -> None:
    began = datetime.datetime.fromtimestamp(NOW - 70, datetime.UTC).isoformat()
    run = make(tmp_path / "run", steps=4, a1={"job": 7, "restarts": 0}, a2={"job": 7, "restarts": 1, "since": began})
    again = Job(7, "RUNNING", 1, False, "None", NOW + 3600)
    os.utime(run / "metrics.jsonl", (NOW - 7200, NOW - 7200))
    text = describe(run, again, NOW)
    assert "step     4 of 10, attempt 2 began 1 min 10 s ago and has completed no step yet" in text
    assert "much longer" not in text
    os.utime(run / "metrics.jsonl", (NOW - 3, NOW - 3))
    assert "step     4 of 10, 3 s ago" in describe(run, again, NOW)


def test_a_preemption_is_not_reported_as_a_time_limit(tmp_path: Path) -> None:
    run = make(tmp_path / "run", steps=4, step_s=60.0, a1={"job": 7, "restarts": 0})
    text = describe(run, Job(7, "RUNNING", 0, True, "None", NOW + 1), NOW)
    assert "time     6 min 00 s left; the job is being preempted: the run saves, it is requeued and resumes\n" in text
    assert "not enough" not in text


def test_a_finished_run_has_no_remaining_time(tmp_path: Path) -> None:
    """Also a run that ended before its last step, which shows the reason."""
    run = make(tmp_path / "run", steps=4, a1={"job": 7, "restarts": 0, "ended": "x", "how": "done", "why": "over"})
    assert "left at this rate" in describe(run, None, NOW)
    finish_run(run, 4, 10, "trained 4 steps: the validation score, 0.900, has reached sft.stop_score=0.9")
    text = describe(run, None, NOW)
    assert "to go" not in text and "finished: trained 4 steps: the validation score, 0.900, has reached" in text


@pytest.mark.parametrize(
    ("reason", "way_out"),
    [
        ("launch_failed_requeued_held", "scontrol release 7"),
        ("JobHeldUser", "scontrol release 7"),
        ("JobHeldAdmin", "an administrator holds it"),
    ],
)
def test_a_held_job_shows_how_to_continue(reason: str, way_out: str, tmp_path: Path) -> None:
    run = make(tmp_path / "run", steps=4, a1={"job": 7, "restarts": 0})
    held = Job(7, "PENDING", 1, False, reason, None)
    assert state(RunFolder(run), held) == f"held: job 7 waits ({reason}) until it is released: {way_out}"


def test_no_resume_is_promised_if_no_job_is_queued(tmp_path: Path) -> None:
    """After the last link of a chain, and after a refused start, nothing of the run is queued."""
    ended = {"job": 7, "restarts": 0, "ended": "x", "how": "requeue", "goes_on": True,
             "why": "resumes from its checkpoint in the next job"}  # fmt: skip
    run = make(tmp_path / "run", steps=4, a1=ended)
    for gone in (None, Job(7, "COMPLETED", 0, False, "", None)):
        told = state(RunFolder(run), gone)
        assert told == "stopped: attempt 1 ended x (requeue): no job of this run is queued; the same command resumes it"
    assert word(run, Job(8, "PENDING", 0, False, "Priority", None)) == "queued"
    (run / "slurm").mkdir()
    record_refusal(run, 8, ["model.path: /models/x is not there"])
    told = state(RunFolder(run), Job(8, "FAILED", 0, False, "", None))
    assert told.startswith("refused: job 8 could not start an attempt at ")
    assert told.endswith(": model.path: /models/x is not there")
    (run / "owners" / "0002").write_text(json.dumps({"since": "then", "host": "h", "job": 9, "restarts": 0}))
    assert word(run, Job(9, "RUNNING", 0, False, "", NOW)) == "running", "the refusal is over"


def test_restarts_and_the_last_error_are_shown(tmp_path: Path) -> None:
    first = {"job": 7, "restarts": 0, "ended": "x", "how": "requeue", "why": "goes on in the next job"}
    second = {"job": 7, "restarts": 1}
    run = make(tmp_path / "run", a1=first, a2=second, a3={"job": 7, "restarts": 2})
    text = describe(run, Job(7, "RUNNING", 2, False, "", NOW + 60), NOW)
    assert "restarts 2" in text and "attempt 1, job 7, then: requeue: goes on in the next job" in text
    assert "attempt 2, job 7, then: lost without a report" in text
    assert last_error(RunFolder(run)) == ""
    for attempt, code, message in ((1, 10, "rank 3 failed"), (2, 75, "stopped by SIGUSR1")):
        (run / "world" / f"attempt_{attempt:04d}").mkdir(parents=True)
        told = {"code": code, "message": message}
        (run / "world" / f"attempt_{attempt:04d}" / "verdict.json").write_text(json.dumps(told))
    assert last_error(RunFolder(run)) == "attempt 1: rank 3 failed", "a stop that was asked for is none"


def test_half_written_files_are_tolerated(tmp_path: Path) -> None:
    """A status may be requested at any moment."""
    run = make(tmp_path / "run", steps=2, a1={"job": 7, "restarts": 0})
    (run / "owners" / "0002").touch()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "cri')
    assert "step     2 of 10" in describe(run, RUNNING_JOB, NOW)
    assert word(run, RUNNING_JOB) == "starting"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_real_job_is_described_in_each_of_its_states(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    """Queued, running, requeued, running again, finished, and then forgotten by Slurm, which has no accounting here."""
    folder = tmp_path / "runs"
    folder.mkdir()
    others = cluster.run("sbatch", "--parsable", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 100")
    wait_until(lambda: "R" in cluster.run("squeue", "-h", "-o", "%t"), lambda: cluster.run("squeue"))
    run = Run(cluster, folder, *tiny, "max_steps=1000", "save_every=2", pace=0.3)
    wait_state(cluster, run.dir, run.job, [PENDING])
    says(cluster, run.dir, f"state    queued: job {run.job} waits (")
    cluster.run("scancel", others.strip())
    run.wait_step(3)
    said = says(cluster, run.job, f"running: job {run.job}, attempt 1", "main: n", "time limit is in", "saved    step")
    assert "controller 0, trainer 0, generator 0" in said and "steps/min" in said
    assert " running " in status(cluster, cwd=tmp_path).stdout, "named by the folder runs/ of where it is asked"
    cluster.run("scontrol", "requeue", str(run.job))
    says(cluster, run.dir, f"requeued: job {run.job} waits")
    cluster.run("scontrol", "update", f"jobid={run.job}", "StartTime=now", check=False)
    said = says(cluster, run.dir, "attempt 2 since", "restarts 1", "attempt 1, job")
    run.tell(pace=0)
    cluster.run("scancel", str(run.job))
    says(cluster, run.dir, "stopped: attempt 2 ended", "the same command resumes it")


@pytest.mark.slow
def test_real_jobs_that_ended_are_described(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    run = Run(cluster, tmp_path, *tiny, "max_steps=2", pace=0)
    wait_state(cluster, run.dir, run.job, [COMPLETED])
    says(cluster, run.dir, "finished: trained 2 steps", "step     2 of 2")
    # Its data disappears between submission and start: refused before an attempt begins.
    data = tmp_path / "data.jsonl"
    data.write_bytes(Path(next(word for word in tiny if word.startswith("data.train="))[11:]).read_bytes())
    words = [*(word for word in tiny if not word.startswith("data.train=")), f"data.train={data}"]
    others = cluster.run("sbatch", "--parsable", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 100")
    wait_until(lambda: "R" in cluster.run("squeue", "-h", "-o", "%t"), lambda: cluster.run("squeue"))
    (tmp_path / "late").mkdir()
    late = Run(cluster, tmp_path / "late", *words, "max_steps=2")
    data.unlink()
    cluster.run("scancel", others.strip())
    said = says(cluster, late.dir, f"refused: job {late.job} could not start an attempt at ", "error", str(data))
    assert "step" not in said.split("error")[0]


def test_a_job_of_another_cluster_is_not_mistaken_for_one_of_this(cluster: Any, tmp_path: Path) -> None:
    number = int(cluster.run("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true"))
    (tmp_path / "slurm").mkdir()
    record_submission(tmp_path, [number], "elsewhere")
    says(cluster, tmp_path, f"state    unknown: job {number}: run this on cluster elsewhere, not on one_machine")
    record_submission(tmp_path, [number], "one_machine")
    says(cluster, tmp_path, f"state    held: job {number} waits (JobHeldUser) until it is released: scontrol release")
    cluster.run("scancel", str(number))


def test_a_folder_that_is_not_a_run_is_refused(cluster: Any, tmp_path: Path) -> None:
    done = status(cluster, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "no run in runs/\n")
    for name, told in (("nothing", "is not a run folder"), ("4711", "job 4711 belongs to no run in runs/")):
        done = status(cluster, name, cwd=tmp_path)
        assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("owner", "told"),
    [
        ({"pid": 1, "process_start": 0.0, "ended": "then"}, "stopped: attempt 1 ended then"),
        ({"job": 7, "restarts": 0}, "unknown: job 7: scontrol is not installed on this machine"),
    ],
)
def test_the_status_is_shown_without_slurm(tmp_path: Path, owner: dict[str, Any], told: str) -> None:
    run = make(tmp_path / "run", steps=2, a1=owner)
    command, environ = [sys.executable, "-m", "hpcrl", "status", str(run)], {"PATH": "/none", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and told in done.stdout and "2 of 10" in done.stdout, done.stderr


def test_links_of_a_chain_are_not_restarts_and_an_early_end_is_reported(tmp_path: Path) -> None:
    ended = {"ended": "x", "how": "requeue", "why": "goes on", "restarts": 0}
    links = make(tmp_path / "links", a1=ended | {"job": 7}, a2=ended | {"job": 8}, a3=ended | {"job": 8, "restarts": 1})
    assert "restarts 1, after 1 earlier job(s)\n" in describe(links, None, NOW)
    requeued = make(tmp_path / "requeued", a1=ended | {"job": 7}, a2=ended | {"job": 7, "restarts": 1})
    assert "restarts 1\n" in describe(requeued, None, NOW)
    run = make(tmp_path / "early", steps=4, a1=ended | {"job": 7})
    finish_run(run, 4, 10, "trained 4 steps: sampled validation score 0.6 reached")
    assert line(run, None, NOW).endswith("  ended early: sampled validation score 0.6 reached")
    finish_run(run, 10, 10, "trained 10 steps")
    assert "early" not in line(run, None, NOW).removeprefix("early")
