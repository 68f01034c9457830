"""GPU-hours by role and phase: hand-made timelines that stand for the steps of their kind."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hpcrl.report.hours_text import in_full, measured_in_words
from hpcrl.report.page import page
from hpcrl.report.role_hours import hours_split, step_hours
from hpcrl.report.run_files import RunFiles
from hpcrl.report.run_hours import run_hours
from hpcrl.timeline.step_file import ChunkRow, CommandRow, StepTimeline, WaitRow, WorkRow, encode, path_of
from tests.report.synthetic import write_run
from tests.report.test_page import blocks
from tests.timeline.steps import make_step

ROLES = (("controller",), ("trainer",), ("generator",), ("reward",))
S = 1_000_000


def made(step: int, validates: bool = False) -> StepTimeline:
    """10 s: 6 of decoding, 3 of training, .5 of publishing; with a validation of 2 more in which 2 s are decoded: the
    pipeline validates from 8.5 to 12 s."""
    found = make_step(length=(12 if validates else 10) * S, step=step, roles=ROLES)
    found.add(ChunkRow(2, 1, 0, 6 * S, 100, 1, 0))
    found.add(CommandRow(1, "TrainStep", 1, 5 * S, 3 * S))
    found.add(WorkRow("reward", 3, 1, "maths", 2 * S, S))
    for rank in (1, 2):
        found.add(CommandRow(rank, "UpdateWeights", 2, 8 * S, S // 2))
    found.add(WaitRow("rollouts", 0, 5 * S))
    if validates:
        found.add(WaitRow("validation", 85 * S // 10, 35 * S // 10))
        found.add(ChunkRow(2, 3, 9 * S, 2 * S, 100, 1, 0))
    return found


def write(folder: Path, *steps: StepTimeline) -> None:
    for step in steps:
        path = path_of(folder, step.header.step)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode(step))


def seconds(hours: dict[str, float]) -> dict[str, float]:
    return {name: pytest.approx(value * 3600, abs=1e-6) for name, value in hours.items()}


def test_a_step_by_role_and_phase() -> None:
    found = step_hours(made(20, validates=True))
    assert found.seconds == 12.0
    assert {
        roles[0]: {phase: value / S for phase, value in spent.items() if value}
        for roles, (_, spent) in found.roles.items()
    } == {
        "trainer": {"train": 3.0, "publish": 0.5, "wait": 8.5},
        "generator": {"generate": 6.0, "evaluate": 2.0, "publish": 0.5, "wait": 3.5},
        "reward": {"score": 1.0, "wait": 11.0},
    }


def test_timelines_stand_for_the_steps_of_their_kind(tmp_path: Path) -> None:
    """27 steps of 10 s and 3 of 12 s with a validation, on 8 GPUs. Three timelines of validations and one of the others
    must not make validations more than they were: the trainer trains 3 s in each of 30 steps, 90 s. The attempts held
    8 GPUs for 8630 s."""
    folder = write_run(tmp_path / "run")
    write(folder, made(5), *(made(step, validates=True) for step in (10, 20, 30)))
    run = RunFiles(folder, "finished: x")
    split = hours_split(run, hours := run_hours(run))
    assert split is not None and (split.unit, split.steps, split.read) == ("GPU-hours", 30, 4)
    assert split.share == pytest.approx(46 / 306)
    trainer, generator = split.roles  # rewards have no GPU
    assert seconds(trainer.hours) == {"train": 90.0, "publish": 15.0, "wait": 201.0}
    assert seconds(generator.hours) == {"generate": 180.0, "publish": 15.0, "evaluate": 6.0, "wait": 105.0}
    assert split.idle == pytest.approx(0.5)
    # 8 GPUs in 3 starts of 30 s up to the first step, and in 30 s of lost steps; then the rest of 8 x 8630 s.
    of_steps = {"generate": 180.0, "train": 90.0, "publish": 30.0, "evaluate": 6.0, "wait": 306.0}
    others = {"start": 720.0, "lost": 240.0, "other": 69040.0 - 612 - 720 - 240}
    assert seconds(split.phases) == of_steps | others
    assert sum(split.phases.values()) == pytest.approx(hours.total.gpu)
    assert "work measured in 4 of 30 steps (15.0% of their time)" in measured_in_words(split)
    assert "more than" not in measured_in_words(split)
    text = "\n".join(in_full(hours, split))
    assert "GPU-hours by phase: work measured" in text and "\nidle: 50.0% of the GPU-hours of these steps\n" in text
    data = blocks(page([run]))["data-0-cost"]
    assert data["split"]["phases"] == pytest.approx(split.phases) and len(data["attempts"]) == 3


def test_timelines_longer_than_their_steps_are_no_more_than_all_of_the_time(tmp_path: Path) -> None:
    """As of steps with a save: metrics count 10 s of each, the timelines 12."""
    folder = write_run(tmp_path / "run")
    rows = ({"step": step, "time/step_total": 10.0} for step in range(1, 4))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(folder, *(made(step, validates=True) for step in (1, 2, 3)))
    run = RunFiles(folder, "finished: x")
    split = hours_split(run, run_hours(run))
    assert split is not None and split.share == pytest.approx(1.0)
    assert sum(split.roles[0].hours.values()) * 3600 == pytest.approx(30.0)


def test_a_kind_without_a_timeline_is_not_divided(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write(folder, made(5))
    run = RunFiles(folder, "finished: x")
    split = hours_split(run, run_hours(run))
    assert split is not None and split.phases["steps without a timeline"] * 3600 == pytest.approx(8 * 36)
    assert "evaluate" not in split.phases and split.phases["train"] * 3600 == pytest.approx(27 * 3)
    text = path_of(folder, 5).read_text()
    path_of(folder, 6).write_text(text.replace('"seconds":10.0', '"seconds":1e400'))
    path_of(folder, 5).write_text("{}\n")
    run = RunFiles(folder, "finished: x")
    split = hours_split(run, run_hours(run))
    assert split is not None and split.roles == [] and split.idle is None
    assert split.phases["steps without a timeline"] * 3600 == pytest.approx(8 * 306)
    assert [problem.partition(", line 1")[0][-12:] for problem in run.problems] == ["000006.jsonl", "000005.jsonl"]
    assert measured_in_words(split) == "no timeline was read, so steps are not divided"


def test_a_run_without_gpus_counts_ranks(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", cluster={"name": "local", "device": "cpu"})
    write(folder, made(5), made(20, validates=True))
    run = RunFiles(folder, "finished: x")
    split = hours_split(run, run_hours(run))
    assert split is not None and split.unit == "rank-hours"
    assert [role.roles for role in split.roles] == ["trainer", "generator", "reward"]
    assert seconds(split.roles[2].hours) == {"score": 30.0, "wait": 276.0}


def test_few_timelines_of_a_long_run_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 steps with some timelines, most of them of a validation."""
    folder = write_run(tmp_path / "run")
    rows = [
        {"step": step, "time/step_total": 10.0} | ({"time/val_step": 2.0} if step % 10 == 0 else {})
        for step in range(10_001)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(folder, *(made(step, validates=step % 10 == 0) for step in (*range(500, 9_950, 500), *range(9_990, 10_001))))
    run = RunFiles(folder, "finished: x")
    began = time.process_time()
    split = hours_split(run, run_hours(run))
    assert time.process_time() - began < 5
    assert split is not None and split.read == 10 and split.steps == 10_000
    assert seconds(split.roles[0].hours)["train"] == 30_000.0
    # 28 h of steps on two GPUs do not fit into the attempts' 2.4 h on eight.
    assert sum(split.phases.values()) > split.total == pytest.approx(8 * 8630 / 3600)
    assert "GPU-hours more than the attempts' times" in measured_in_words(split)
    monkeypatch.setattr("hpcrl.report.role_hours.MAX_BYTES", 4 * path_of(folder, 500).stat().st_size)
    run = RunFiles(folder, "finished: x")
    fewer = hours_split(run, run_hours(run))
    assert fewer is not None and 0 < fewer.read <= 4


def test_a_run_that_only_evaluates_or_never_began_has_no_split(tmp_path: Path) -> None:
    planned = tmp_path / "planned"
    (planned / "slurm").mkdir(parents=True)
    (planned / "slurm" / "submitted.json").write_text(json.dumps({"jobs": [9], "cluster": "", "at": "x"}))
    run = RunFiles(planned, "queued: job 9 waits")
    assert hours_split(run, run_hours(run)) is None
    assert "data-0-cost" not in blocks(page([run]))
