"""`hpcrl eval RUN --follow` without ranks: which checkpoints are evaluated, what it waits for, the table, bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.cluster import slurm
from hpcrl.launch import watched
from hpcrl.launch.evaluation import main
from hpcrl.metrics.evaluated import summarised
from hpcrl.metrics.over_steps import table_over_steps, unlike_the_last
from hpcrl.metrics.responses import header
from hpcrl.run_folder import finish_run, record_submission
from hpcrl.system.exit_codes import ExitCode
from tests import in_process
from tests.launch.test_evaluation import make_run
from tests.metrics.test_responses import response
from tests.test_launch import write_model

SCORES = {1: (0.0, 1.0), 2: (1.0, 1.0), 3: (1.0, 0.0), 4: (0.0, 0.0), 5: (1.0, 1.0), 6: (1.0, 1.0)}
"""Step -> the scores of its two prompts. Steps 2, 5 and 6 are equally good."""


def summary(step: int, **settings: Any) -> dict[str, Any]:
    head = header("model", 0, {"a": {"temperature": 0.0, "samples": 1, "max_new_tokens": 8, **settings}})
    return summarised(head, [response("a", row, 0, score) for row, score in enumerate(SCORES[step])])


def end_evaluation(folder: Path, step: int, **settings: Any) -> None:
    """What a finished evaluation leaves that --follow reads."""
    write_model(folder / "evaluated" / "hf")
    (folder / "evaluation.json").write_text(json.dumps(summary(step, **settings)))
    finish_run(folder, 0, 1, "evaluated 2 responses to 2 prompts")


class World:
    """A run whose checkpoints come while it is looked at, and evaluations that end at once."""

    def __init__(self, at: Path, monkeypatch: pytest.MonkeyPatch):
        self.at, self.events, self.started, self.naps = at, list[Callable[[], Any]](), list[int](), 0
        self.patch = monkeypatch
        rows = at / "rows.jsonl"
        rows.write_text('{"prompt": "a", "answer": "b"}\n')
        self.words = [f"data.val={rows}", f"data.train={rows}", "eval_every=0", "reward.default.name=exact_match"]
        self.run = make_run(at / "runs" / "one", self.words, [])
        (self.run / "finished.json").unlink()
        self.host = {"host": "elsewhere", "pid": 1, "process_start": 0.0, "since": "2026-01-01T00:00:00+00:00"}
        (self.run / "owners").mkdir()
        self.own({})
        monkeypatch.setattr("hpcrl.launch.evaluation.start", self.start)
        monkeypatch.setattr("hpcrl.launch.evaluation._convert", lambda checkpoint, target, config: write_model(target))
        monkeypatch.setattr("hpcrl.launch.evaluation._check_settings", lambda words: None)
        # Not the module's own sleep, which threads of earlier tests may call.
        own_time = SimpleNamespace(sleep=self.sleep)
        monkeypatch.setattr("hpcrl.launch.following.time", own_time)
        monkeypatch.setattr("hpcrl.launch.evaluation.time", own_time)
        monkeypatch.setattr(watched, "SETTLE_S", 0.0)

    def own(self, ended: dict[str, str]) -> None:
        (self.run / "owners" / "0001").write_text(json.dumps(self.host | ended))

    def folder(self, step: int, branch: str = "") -> Path:
        return self.at / "runs" / f"one_eval_step_{step:06d}{branch}"

    def save(self, *steps: int, keep: int = 9) -> None:
        """Write checkpoints, and remove the oldest as keep_checkpoints does."""
        for step in steps:
            (self.run / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
        for folder in sorted((self.run / "checkpoints").iterdir())[:-keep]:
            shutil.rmtree(folder)

    def end(self) -> None:
        """The run fails: no attempt runs or waits."""
        self.own({"ended": "2026-01-01T01:00:00+00:00", "how": "failed", "why": "a rank is lost"})

    def sleep(self, seconds: float) -> None:
        self.naps += 1
        assert self.naps < 50, "it waits for ever"
        if self.events:
            self.events.pop(0)()

    def start(self, argv: Sequence[str]) -> int:
        name = next(word.partition("=")[2] for word in argv if word.startswith("run_name="))
        step = int(name.removeprefix("one_eval_step_")[:6])
        self.started.append(step)
        end_evaluation(self.at / "runs" / name, step)
        return ExitCode.DONE

    def follow(self, *words: str) -> tuple[int, list[str], list[str]]:
        done = in_process.run(main, "one", "--follow", *words, at=self.at)
        return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_every_checkpoint_is_evaluated_until_the_run_ends(world: World) -> None:
    """The table has the mean of two prompts' scores: 1/2 ± sqrt(1/2)/sqrt(2) = 1/2, and 1 ± 0."""
    world.save(1)
    world.events = [lambda: world.save(2, 3), world.end]
    code, told, errors = world.follow()
    assert (code, errors, world.started) == (ExitCode.DONE, [], [1, 2, 3])
    at = told.index("step  a")
    assert told[at + 1 : at + 4] == ["1     0.500 ± 0.500", "2     1.000 ± 0.000", "3     0.500 ± 0.500"]
    assert told[at + 4].startswith("best step 2: val/score/mean 1 (max), model runs/one_eval_step_000002/evaluated/hf")
    assert told[-1].startswith(
        "runs/one is stopped: attempt 1 ended 2026-01-01T01:00:00+00:00 (failed): a rank is lost"
    )
    code, again, _ = world.follow()
    assert (code, world.started) == (ExitCode.DONE, [1, 2, 3]) and again == told[at - 1 :], "nothing twice"


def test_the_last_checkpoint_is_not_missed(world: World) -> None:
    """The run writes it and ends between two looks."""

    def finish() -> None:
        world.save(4)
        finish_run(world.run, 4, 4, "trained 4 steps")
        world.own({"ended": "2026-01-01T01:00:00+00:00"})

    world.events = [finish]
    code, told, _ = world.follow()
    assert (code, world.started) == (ExitCode.DONE, [4]) and "runs/one is finished: trained 4 steps" in told[-1]


def test_another_machines_files_may_be_late(world: World) -> None:
    """After the end of a run elsewhere, checkpoints are looked for until NFS shows them; at once for a run of here."""
    clock = [0.0]
    world.patch.setattr(watched, "SETTLE_S", 65.0)
    world.patch.setattr("hpcrl.launch.watched.time.monotonic", lambda: clock[0])

    def later() -> None:
        clock[0] += 40.0

    world.save(1)
    world.events = [world.end, lambda: (later(), world.save(2)), later]
    code, _, _ = world.follow()
    assert (code, world.started, world.events) == (ExitCode.DONE, [1, 2], [])
    assert world.follow()[0] == ExitCode.DONE and world.naps == 3, "an end that was there before is not waited for"


def test_checkpoints_removed_meanwhile_are_skipped_with_a_line(world: World) -> None:
    inner = world.start

    def start(argv: Sequence[str]) -> int:
        if not world.started:
            world.save(4, keep=1)
        return inner(argv)

    world.patch.setattr("hpcrl.launch.evaluation.start", start)
    world.save(1, 2, 3)
    world.end()
    code, told, _ = world.follow()
    assert (code, world.started) == (ExitCode.DONE, [1, 4])
    skipped = [line for line in told if "is skipped" in line]
    assert skipped == [
        f"step {step} is skipped: its checkpoint was removed (keep_checkpoints; --every N leaves out steps)"
        for step in (2, 3)
    ]


def test_a_checkpoint_removed_while_it_is_read_is_skipped(world: World) -> None:
    def convert(checkpoint: Path, target: Path, config: Any) -> None:
        if checkpoint.name == "step_000001":
            shutil.rmtree(checkpoint)
            raise FileNotFoundError(2, "No such file or directory", str(checkpoint))
        write_model(target)

    world.patch.setattr("hpcrl.launch.evaluation._convert", convert)
    world.save(1, 2)
    world.end()
    code, told, errors = world.follow()
    assert (code, errors, world.started) == (ExitCode.DONE, [], [2])
    assert [line for line in told if "is skipped" in line] == [
        "step 1 is skipped: its checkpoint was removed before it was read (keep_checkpoints)"
    ]
    assert not world.folder(1).exists()


def test_a_checkpoint_that_is_there_and_unreadable_is_an_error(world: World) -> None:
    def convert(checkpoint: Path, target: Path, config: Any) -> None:
        raise ValueError(f"{checkpoint}: damaged")

    world.patch.setattr("hpcrl.launch.evaluation._convert", convert)
    world.save(1)
    code, _, errors = world.follow()
    assert (code, errors) == (ExitCode.BAD_INPUT, ["hpcrl eval: runs/one/checkpoints/step_000001: damaged"])


def test_every_and_newest_leave_out_steps(world: World) -> None:
    world.save(1, 2, 3, 4)
    world.events = [lambda: world.save(5, 6), world.end]
    assert world.follow("--every", "2")[0] == ExitCode.DONE and world.started == [2, 4, 6]
    shutil.rmtree(world.folder(6))
    code, told, _ = world.follow("--newest")
    assert (code, world.started) == (ExitCode.DONE, [2, 4, 6, 6])
    assert [line for line in told if "is skipped" in line] == ["step 5 is skipped: step 6 is newer"]
    assert "best step 2: val/score/mean 1 (max)" in "".join(told), "of equal steps the first is named"


def test_only_the_best_model_is_kept_if_wanted(world: World) -> None:
    world.save(1, 2, 3)
    world.end()
    (world.folder(1) / "evaluated" / ".hf.removed").mkdir(parents=True)  # of a kill
    (world.folder(1) / "config.yaml").touch()
    assert world.follow("--keep-best")[0] == ExitCode.DONE
    kept = [step for step in (1, 2, 3) if any((world.folder(step) / "evaluated").glob("*hf*"))]
    assert kept == [2] and world.follow()[0] == ExitCode.DONE and world.started == [1, 2, 3]


def test_an_evaluation_whose_checkpoint_is_gone_goes_on_after_a_kill(world: World) -> None:
    """Its model was converted before."""
    world.save(2)
    write_model(world.folder(1) / "evaluated" / "hf")
    world.end()
    assert world.follow()[0] == ExitCode.DONE and world.started == [1, 2]


def test_a_failed_evaluation_ends_the_following(world: World) -> None:
    world.save(1, 2, 3)
    inner = world.start
    codes = {1: ExitCode.DONE, 2: ExitCode.RANK_FAILED}
    world.patch.setattr("hpcrl.launch.evaluation.start", lambda argv: codes[len(world.started) + 1] or inner(argv))
    code, told, _ = world.follow()
    assert (code, world.started) == (ExitCode.RANK_FAILED, [1]) and "1     0.500 ± 0.500" in told


def test_a_signal_at_an_evaluations_end_ends_the_following(world: World) -> None:
    """The agent notes signals and ignores them once its run has ended."""
    world.save(1, 2)
    inner, before = world.start, signal.getsignal(signal.SIGTERM)

    def start(argv: Sequence[str]) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return inner(argv)

    world.patch.setattr("hpcrl.launch.evaluation.start", start)
    try:
        assert world.follow()[0] == ExitCode.TERMINATED and world.started == [1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_branch_has_evaluations_of_its_own(world: World) -> None:
    """Steps up to the branch keep theirs."""
    world.save(1, 2, 3)
    world.end()
    assert world.follow()[0] == ExitCode.DONE
    attempts = [{"attempt": 1}, {"attempt": 2, "branch": {"from": 2}}]
    (world.run / "facts.json").write_text(json.dumps({"attempts": attempts}))
    code, told, _ = world.follow()
    assert (code, world.started) == (ExitCode.DONE, [1, 2, 3, 3]) and world.folder(3, "_branch_2").is_dir()
    assert [line[:1] for line in told[told.index("step  a") + 1 :][:3]] == ["1", "2", "3"]


def submit(folder: Path, job: int) -> None:
    (folder / "slurm").mkdir(parents=True, exist_ok=True)
    record_submission(folder, [job])


class Jobs:
    """Slurm as far as a follower asks it: one job, by its states at each look."""

    def __init__(self, world: World, job: int):
        self.world, self.job, self.states, self.submitted = world, job, list[str](), list[str]()
        world.patch.setattr("hpcrl.cluster.slurm.find_job", self.find)
        world.patch.setattr("hpcrl.cluster.slurm.find_accounted", lambda job: None)
        world.patch.setattr("hpcrl.cluster.slurm.cluster_name", lambda: "")
        world.patch.setattr("hpcrl.launch.evaluation.start", self.start)
        world.events = [self.next] * 9

    def find(self, job: int, timeout_s: float = 0.0) -> slurm.Job | None:
        assert job == self.job, "one job at a time"
        return slurm.Job(job, self.states[0], 0, False, "Priority", None) if self.states else None

    def next(self) -> None:
        """Time passes; a job that has ended has evaluated its step."""
        if self.states and len(self.states) == 1:
            end_evaluation(self.world.at / "runs" / self.submitted[-1], 1)
        self.states = self.states[1:]

    def start(self, argv: Sequence[str]) -> int:
        """Submit the next job."""
        assert not self.states and "+cluster=slurm" in argv
        name = next(word.partition("=")[2] for word in argv if word.startswith("run_name="))
        self.submitted.append(name)
        self.job, self.states = self.job + 1, ["PENDING", "RUNNING"]
        submit(self.world.at / "runs" / name, self.job)
        return ExitCode.DONE


def test_jobs_are_submitted_one_at_a_time(world: World) -> None:
    world.save(1, 2)
    world.end()
    jobs = Jobs(world, 100)
    code, told, errors = world.follow("+cluster=slurm")
    assert (code, errors) == (ExitCode.DONE, []) and jobs.submitted == ["one_eval_step_000001", "one_eval_step_000002"]
    assert "runs/one_eval_step_000001 is queued: job 101 waits (Priority)" in told


def test_a_queued_job_is_not_submitted_again(world: World) -> None:
    """A follower that was killed had submitted it."""
    world.save(1)
    world.end()
    jobs = Jobs(world, 7)
    jobs.states, jobs.submitted = ["PENDING", "RUNNING"], [world.folder(1).name]
    submit(world.folder(1), 7)
    code, told, _ = world.follow("+cluster=slurm")
    assert code == ExitCode.DONE and jobs.job == 7 and "1     0.500 ± 0.500" in told
    assert "step 1: its evaluation was started before, waiting for it" in told


def test_a_job_that_ends_without_results_is_an_error(world: World) -> None:
    world.save(1)
    world.end()
    jobs = Jobs(world, 100)
    world.events = [lambda: setattr(jobs, "states", [])]
    code, _, errors = world.follow("+cluster=slurm")
    state = "runs/one_eval_step_000001 is never started: Slurm lists no job of this run"
    assert (code, errors) == (ExitCode.FAILED, [f"hpcrl eval: step 1 is not evaluated: {state}"])


def test_a_submitted_run_is_waited_for(world: World) -> None:
    """Its folder has no config.yaml before the first attempt."""
    Jobs(world, 5).states = ["PENDING"] * 3
    stored = (world.run / "config.yaml").read_bytes()
    (world.run / "config.yaml").unlink()
    (world.run / "owners" / "0001").unlink()
    submit(world.run, 5)

    def begin() -> None:
        (world.run / "config.yaml").write_bytes(stored)
        world.save(1)
        (world.run / "slurm" / "submitted.json").unlink()
        world.end()
        world.patch.setattr("hpcrl.launch.evaluation.start", world.start)

    world.events = [begin]
    code, told, _ = world.follow()
    assert (code, world.started) == (ExitCode.DONE, [1]) and told[0] == "runs/one is queued: job 5 waits (Priority)"


def test_bad_input_is_one_line_with_a_way_out(world: World) -> None:
    world.end()
    write_model(world.at / "whole")
    make_run(world.at / "runs" / "blind", world.words[1:], [1])
    nothing = "nothing to evaluate, no checkpoint, and the run is stopped: attempt 1 ended 2026"
    for words, line in (
        (["one", "--follow"], f"runs/one: {nothing}"),
        (["one", "--follow", "--step", "1"], "--step 1: --follow evaluates every checkpoint; leave one of the two out"),
        (["whole", "--follow"], "--follow: whole is not a run folder (no config.yaml); leave --follow out"),
        (["gone", "--follow"], "--follow: gone is not a run folder (no config.yaml); leave --follow out"),
        (["blind", "--follow"], "runs/blind: the run has no validation data (data.val); give data.val=FILE"),
        (["one", "--follow", "--every", "0"], "--every 0: expected a number of steps from 1"),
        (["one", "--follow", "run_name=x"], "run_name=x: --follow starts a run for each step; leave run_name out"),
        (["one", "--follow", "+resume=fresh"], "+resume=fresh: --follow starts a run for each step; leave resume out"),
        (["one", "--newest"], "--newest belongs to --follow; give both or none"),
        (["one", "--every", "2"], "--every belongs to --follow; give both or none"),
    ):
        done = in_process.run(main, *words, at=world.at)
        assert (done.returncode, done.stdout) == (ExitCode.BAD_INPUT, ""), words
        assert done.stderr.startswith(f"hpcrl eval: {line}") and done.stderr.count("\n") == 1, done.stderr
    world.save(3)
    code, _, errors = world.follow("--every", "2")
    assert code == ExitCode.BAD_INPUT and "--every 2: no multiple among the checkpoints [3]" in errors[0]
    assert not world.started


def test_a_damaged_result_is_named(world: World) -> None:
    world.end()
    end_evaluation(world.folder(1), 1)
    (world.folder(1) / "evaluation.json").write_text('{"metrics": {')
    code, _, errors = world.follow()
    assert code == ExitCode.BAD_INPUT and len(errors) == 1
    assert "runs/one_eval_step_000001/evaluation.json cannot be read" in errors[0]
    assert errors[0].endswith("remove runs/one_eval_step_000001 to evaluate it again")


def test_scores_that_do_not_compare_are_noted(world: World) -> None:
    """Another temperature, and a run that was removed and trained again."""
    world.save(1, 2)
    (world.run / "checkpoints" / "step_000002" / "manifest.json").write_text("{}")
    end_evaluation(world.folder(1), 1, temperature=0.5)
    end_evaluation(world.folder(2), 2)
    os.utime(world.folder(2) / "finished.json", (1.0, 1.0))
    world.end()
    _, told, _ = world.follow()
    assert "note: other sets, sampling or prompts than step 2: 1" in told
    assert "note: older than the checkpoint; if the run was trained again, remove runs/one_eval_step_000002" in told


def test_a_table_has_a_column_for_each_set() -> None:
    scored = {"score": 0.25, "score_stderr": 0.125, "samples": 1}
    summaries = {
        20: {"sets": {"a": scored, "b c": {**scored, "score_stderr": None}}},
        3: {"sets": {"a": {**scored, "score": 1.0}}},
    }
    assert table_over_steps(summaries) == [
        "step  a              b c",
        "3     1.000 ± 0.125  -",
        "20    0.250 ± 0.125  0.250",
    ]
    assert unlike_the_last(summaries) == [3] and unlike_the_last({}) == []
