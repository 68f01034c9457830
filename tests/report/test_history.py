"""What ended each attempt, what was lost, how long restarts took, and where the hours went: worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.metrics.metric_table import MetricTable
from hpcrl.report.attempt_history import histories
from hpcrl.report.overview import section
from hpcrl.report.phases import phase_hours, phase_seconds
from hpcrl.report.run_files import RunFiles
from tests.report.synthetic import BEGAN, write_run


def test_attempts_of_a_run_that_was_preempted_and_lost(tmp_path: Path) -> None:
    first, second, third = histories(RunFiles(write_run(tmp_path / "run")))
    assert (first.end, second.end, third.end) == ("preempted", "lost", "finished")
    assert "stopped by SIGUSR1 after step 10" in first.why and "next job" in first.why
    assert (first.resumed_from, second.resumed_from, third.resumed_from) == (0, 10, 12)
    assert (first.last_step, second.last_step, third.last_step) == (10, 15, 30)
    assert (first.lost_steps, second.lost_steps, third.lost_steps) == ((), (13, 14, 15), ())
    assert (first.began, first.first_step_at, first.ended) == (BEGAN, BEGAN + 40, BEGAN + 150)
    # Attempt 1 ended at 150, attempt 2 began at 300 and had its first step at 340, and the last sign of it is of 380.
    assert (second.restart_s, second.waited_s, second.ended) == (190.0, 150.0, BEGAN + 380)
    assert (third.restart_s, third.waited_s) == (260.0, 220.0)


@pytest.mark.parametrize(
    ("owner", "world", "log", "end", "why"),
    [
        ({"how": "terminated", "why": "the job was cancelled"}, {}, "", "cancelled", "the job was cancelled"),
        ({}, {"verdict.json": {"code": 14, "message": "no groups"}}, "", "failed", "no groups"),
        ({}, {"outcome.json": {"code": 11}}, "", "failed", "exit code 11 (RANK_KILLED)"),
        ({}, {"outcome.json": {"code": 99}}, "", "failed", "exit code 99 (unknown)"),
        ({"how": "deadline", "why": "crash 1"}, {}, "", "failed", "deadline; crash 1"),
        ({"how": "requeue", "why": "resumes"}, {}, "", "signal", "resumes"),
        ({"how": "requeue", "why": "resumes"}, {}, "CANCELLED AT x DUE TO TIME LIMIT", "time limit", "resumes"),
        (
            {"how": "requeue", "by": "preempted"},
            {},
            "CANCELLED AT x DUE TO JOB REQUEUE",
            "preempted",
            "Slurm gave its nodes to another job",
        ),
        (
            {"how": "terminated"},
            {},
            "CANCELLED AT x DUE TO NODE FAILURE, SEE LOG",
            "node failed",
            "Slurm lost a node of the job",
        ),
        ({"how": "requeue", "by": "nodes"}, {}, "", "requeued", "Slurm requeued the job"),
        ({"how": "requeue", "by": "time"}, {}, "", "time limit", "the job's time limit"),
        ({"how": "lost", "why": "crash 1 of 3"}, {}, "", "lost", "crash 1 of 3"),
        ({}, {}, "", "ended", ""),
    ],
)
def test_the_end_of_an_attempt(tmp_path: Path, owner: dict, world: dict, log: str, end: str, why: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "finished.json").unlink()
    record = {"since": "2026-11-28T19:10:00+00:00", "job": 50, "restarts": 2, "ended": "2026-11-28T19:20:00+00:00"}
    (folder / "owners" / "0003").write_text(json.dumps(record | owner))
    with open(folder / "slurm" / "job-50.log", "a") as file:
        file.write(f"slurmstepd: error: *** STEP 50.0 ON n1 {log} ***\n")
    for name, content in world.items():
        path = folder / "world" / "attempt_0003" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    last = histories(RunFiles(folder))[-1]
    assert (last.end, last.why) == (end, why)


def test_an_attempt_that_runs_is_not_lost(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "finished.json").unlink()
    (folder / "owners" / "0003").write_text('{"since": "2026-11-28T19:10:00+00:00", "job": 50, "restarts": 2}')
    assert histories(RunFiles(folder))[-1].end == "lost"
    last = histories(RunFiles(folder, "running: job 50, attempt 3"))[-1]
    assert (last.end, last.ended) == ("running", None)


def test_histories_without_logs_and_of_a_run_that_never_started(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for file in (folder / "logs").rglob("*.log"):
        file.unlink()
    first, second, _ = histories(RunFiles(folder))
    assert (first.resumed_from, second.resumed_from, second.first_step_at, second.restart_s) == (0, None, None, None)
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "plan.txt").write_text("nodes  all: 2 nodes\n")
    run = RunFiles(tmp_path / "plan")
    assert histories(run) == []
    data = section(run).data
    assert ["state", "never started"] in data["what"] and data["plan"].startswith("nodes") and data["hours"] == []


def test_phases_of_a_step() -> None:
    """10 s: 6 of generation (1 of them waits for rewards), .5 transfer, 3 training, .25 update; then a validation."""
    row = {
        "step": 1,
        "time/step_generate": 6.0,
        "time/step_reward_wait": 1.0,
        "time/step_rollout_transfer": 0.5,
        "time/step_train": 2.0,
        "time/old_log_probs": 1.0,
        "time/step_update_weights": 0.25,
        "time/val_step": 4.0,
        "time/step_total": 10.0,
        "time/save_drain": 50.0,
        "time/save": None,
    }
    assert phase_seconds(MetricTable.of([row])) == {
        "generation": 5.0,
        "waiting for rewards": 1.0,
        "rollout transfer": 0.5,
        "training": 3.0,
        "weight updates": 0.25,
        "validation": 4.0,
        "other work of steps": 0.25,
    }


def test_hours_count_nodes_gpus_lost_steps_and_starts(tmp_path: Path) -> None:
    run, lost = RunFiles(write_run(tmp_path / "run")), {"step": 1, "time/step_total": 36.0}
    hours = {
        phase.name: phase
        for phase in phase_hours(run.metrics, MetricTable.of([lost]), histories(run), 2, 8, MetricTable())
    }
    assert hours["training"].seconds == 31 * 3.0  # step 0 has times in this run, too
    assert hours["lost and computed again"].node_hours == pytest.approx(36 * 2 / 3600)
    assert hours["lost and computed again"].gpu_hours == pytest.approx(36 * 8 / 3600)
    assert hours["starts of attempts"].seconds == 120.0  # 40 s each


def test_the_overview_names_the_preset_the_changes_and_the_resources(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "restarts.json").write_text('{"crashes": 1, "short": 0, "checkpoint": "step_000012", "submission": 50}')
    data = section(RunFiles(folder)).data
    what = dict(data["what"])
    assert what["algorithm"] == "dapo (grpo, ppo)" and what["steps"] == "30 of 30"
    assert what["lost"] == "3 step(s) were computed again" and "warnings" not in what
    assert what["ends without a new checkpoint"] == "1 crash(es); cluster.max_restarts is 3"
    assert (data["nodes"], data["gpus"]) == (2, 8)
    changes = [attempt["changes"] for attempt in data["attempts"]]
    assert changes == [[], ["save_every: 5 -> 6"], ["torch: 2.12.0 -> 2.13.0", "host: n1 -> n3"]]
    assert data["attempts"][1]["where"] == "job 50, restart 1 on n1"
    ranks = {phase["name"]: phase["ranks"] for phase in data["hours"]}
    assert ranks["generation"] == ranks["training"] == "7 of 8"
