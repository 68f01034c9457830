"""A branch from the command line to the run folder: plan, refusals, a queued job and its requeue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from hpcrl.config import ConfigError
from hpcrl.launch.__main__ import main
from hpcrl.launch.prepare import prepare
from hpcrl.run_folder import branches_of, open_run, settle_branch, stored_config
from hpcrl.run_folder.records import read_attempts
from hpcrl.system.exit_codes import ExitCode
from tests.checkpoint.test_commit import save, truncate
from tests.launch.test_frozen import MINE, in_job, script_words, started
from tests.launch.test_frozen import mine as mine  # noqa: PLC0414  # a fixture

GIVEN = ["+experiment=mine", "trainer.lr=1e-3"]


@pytest.fixture
def run(mine: Path) -> Path:
    """A run of the experiment with another rate, which has ended with checkpoints of three steps."""
    run_dir = started("trainer.lr=1e-3")
    for step in (2, 4, 6):
        save(run_dir / "checkpoints", step, keep=9)
    return run_dir


def refused(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        prepare(list(words))
    return error.value.problems


def test_the_plan_shows_the_branch(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+experiment=mine", "trainer.lr=1e-5", "resume_from=4", "dry_run=true"]
    assert main(words) == ExitCode.DONE
    plan = capsys.readouterr().out
    assert "attempt 2, resumes, branch from step 4, later work moves to abandoned/" in plan
    assert "changed: trainer.lr: 0.001 -> 1e-05" in plan
    assert stored_config(run).resume_from is None and branches_of(read_attempts(run)) == []


def test_a_rate_that_was_left_out_or_is_only_in_a_file_does_not_change(mine: Path, run: Path) -> None:
    lines = refused("+experiment=mine", "resume_from=4")
    assert lines[1:] == [
        "trainer.lr: 0.001 -> 0.0001: the command line does not give it; a branch changes only what it gives"
    ]
    mine.write_text(MINE.format(lr=9e-4) + "  max_grad_norm: 0.5\n")
    config, *_, state, _ = prepare([*GIVEN, "resume_from=4"])
    assert (config.trainer.lr, config.trainer.max_grad_norm, state.changes) == (1e-3, 1.0, [])
    assert state.ignored == ["trainer.max_grad_norm: 1.0 -> 0.5"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["resume_from=5"], "has checkpoints of steps 2, 4, 6, none of step 5"),
        (["resume_from=first"], "resume_from"),
        (["resume_from=4", "resume=fresh"], "resume=fresh starts another"),
        (["resume_reason=why"], "resume_reason: it is recorded with a branch; give resume_from"),
        (["resume_from=4", "data.train=task:add"], 'data.train: "task:sort_digits" -> "task:add"'),
        (["resume_from=4", "run_name=none"], "holds no run to continue"),
    ],
)
def test_what_a_branch_refuses(run: Path, words: Sequence[str], said: str) -> None:
    lines = refused(*GIVEN, *words)
    assert any(said in line for line in lines) and all("Traceback" not in line for line in lines)
    assert yaml.safe_load((run / "config.yaml").read_text())["resume_from"] is None


def test_a_damaged_checkpoint_is_refused_before_the_start(run: Path) -> None:
    truncate(run / "checkpoints/step_000004/state.json")
    (line,) = refused(*GIVEN, "resume_from=4")
    assert "the checkpoint of step 4" in line and "state.json has" in line and "(checkpoints of steps 2, 6)" in line
    (run / "checkpoints/step_000006/manifest.json").unlink()
    (line,) = refused(*GIVEN, "resume_from=latest")
    assert "the checkpoint of step 6" in line and "it has no manifest.json" in line


def test_a_trial_reads_the_content_of_the_checkpoint(run: Path) -> None:
    file = run / "checkpoints/step_000004/state.json"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"x")
    prepare([*GIVEN, "resume_from=4"])  # the start itself reads it
    (line,) = refused(*GIVEN, "resume_from=4", "dry_run=true")
    assert "the checkpoint of step 4" in line and "state.json" in line and "(checkpoints of steps 2, 6)" in line
    file.write_bytes(content)
    prepare([*GIVEN, "resume_from=4", "dry_run=true"])


def test_a_branch_of_a_run_that_starts_over_is_one_problem(run: Path) -> None:
    (line,) = refused(*GIVEN, "resume_from=4", "resume=fresh")
    assert "resume=fresh starts another" in line


def test_profiled_steps_of_a_conversion_are_one_problem(mine: Path) -> None:
    lines = refused("pipeline=convert", "profile.steps=[3]")
    assert [line for line in lines if "profile" in line] == [
        "profile.steps: not read here, the convert pipeline neither trains nor generates (override 'profile.steps=[3]')"
    ]


def test_a_plain_start_names_the_way_to_another_rate(run: Path) -> None:
    head, *lines = refused("+experiment=mine", "trainer.lr=1e-5")
    assert "trainer.lr may change at a branch, with resume_from=latest or a checkpoint's step" in head
    assert lines == ["trainer.lr: 0.001 -> 1e-05"]


def test_a_runs_own_configuration_may_be_branched_and_starts_other_runs_without_it(run: Path) -> None:
    own = f"--config={run / 'config.yaml'}"
    config, *_, state, _ = prepare([own, "resume_from=4", "trainer.lr=1e-5"])
    opened = open_run(config.model_dump(mode="json"), run, "auto", arguments=state.arguments)
    assert (opened.from_step, stored_config(run).resume_from, stored_config(run).trainer.lr) == (4, 4, 1e-5)
    config, *_ = prepare([own, "run_name=other"])
    assert (config.resume_from, config.trainer.lr) == (None, 1e-5)


@pytest.mark.slow
def test_a_submitted_branch_begins_once(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["+cluster=slurm", "+experiment=mine", "cluster.time=60"]
    run = Path("runs/mine")
    assert in_job(monkeypatch, *words) == ExitCode.DONE
    for step in (2, 4, 6):
        save(run / "checkpoints", step, keep=9)
    assert main([*words, "resume_from=4", "trainer.lr=1e-5", "resume_reason='a b'"]) == ExitCode.DONE
    of_script = script_words(run)
    assert stored_config(run).trainer.lr == 1e-4, "nothing changes before the job starts"
    capsys.readouterr()
    told = []
    for attempt in (2, 3, 4):  # killed before the branch is settled, then after it
        assert in_job(monkeypatch, *of_script) == ExitCode.DONE
        shown = capsys.readouterr()
        assert shown.out.split()[0] == str(attempt)
        told.append("branch from step 4, later work moves" in shown.err)
        config = stored_config(run)
        assert (config.trainer.lr, config.resume_from) == (1e-5, None if attempt == 4 else 4)
        if attempt == 3:
            settle_branch(run)
            save(run / "checkpoints", 8, keep=9)
    assert told == [True, False, False]
    (branch,) = branches_of(read_attempts(run))
    assert (branch["attempt"], branch["from"], branch["reason"]) == (2, 4, "a b")
    assert branch["arguments"] == [*words, "trainer.lr=1e-5"]
    assert branch["changes"] == ["trainer.lr: 0.0001 -> 1e-05"]
