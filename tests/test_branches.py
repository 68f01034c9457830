"""A run's branches: which keys may change, from which step, what is recorded, and when the same command goes on."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrl.algorithms.adaptive import after_changes
from hpcrl.commands import status
from hpcrl.config import Config, ConfigError, parse
from hpcrl.run_folder import (
    BRANCH_KEYS,
    MAY_CHANGE,
    branches_of,
    check_run,
    close_run,
    division_keys,
    finish_run,
    open_run,
    settle_branch,
)
from hpcrl.run_folder.records import read_attempts

CONFIG: dict[str, Any] = {
    "run_name": "demo",
    "max_steps": 100,
    "resume_from": None,
    "resume_reason": "",
    "trainer": {"betas": [0.9, 0.999], "lr": 1e-5},
    "rollout": {"temperature": 1.0, "max_staleness": 0},
    "model": {"path": None},
}
SLOWER = {"trainer": {"betas": [0.9, 0.999], "lr": 1e-6}}


def with_steps(run: Path, *steps: int, config: dict[str, Any] = CONFIG) -> Path:
    """A run that has ended after an attempt with these checkpoints."""
    close_run(run, open_run(config, run, "auto").attempt)
    for step in steps:
        (run / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
        (run / "checkpoints" / f"step_{step:06d}" / "manifest.json").touch()
    return run


def start(run: Path, **values: Any) -> Any:
    opened = open_run(CONFIG | values, run, "auto")
    if opened.kind != "finished":
        close_run(run, opened.attempt)
    return opened


def stored(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text())


def lines_of(run: Path, **values: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        check_run(CONFIG | values, run, "auto")
    return error.value.problems


def test_a_branch_changes_the_rate_and_is_recorded(tmp_path: Path) -> None:
    run = with_steps(tmp_path / "demo", 20, 40, 60)
    opened = start(run, **SLOWER, resume_from=40, resume_reason="diverged")
    assert (opened.kind, opened.attempt, opened.from_step) == ("resume", 2, 40)
    assert opened.changes == ["trainer.lr: 1e-05 -> 1e-06"]
    assert (stored(run)["resume_from"], stored(run)["trainer"]["lr"]) == (40, 1e-6)
    (branch,) = branches_of(read_attempts(run))
    told = {"attempt": 2, "from": 40, "asked": 40, "reason": "diverged", "arguments": None}
    assert branch == told | {"changes": ["trainer.lr: 1e-05 -> 1e-06"]}
    settle_branch(run)
    assert (stored(run)["resume_from"], stored(run)["resume_reason"], stored(run)["trainer"]["lr"]) == (None, "", 1e-6)
    settle_branch(run)


def test_the_same_command_goes_on_with_its_branch(tmp_path: Path) -> None:
    run = with_steps(tmp_path / "demo", 20, 40, 60)
    words = {**SLOWER, "resume_from": 40}
    assert start(run, **words).branch is not None
    settle_branch(run)
    again = start(run, **words)
    assert (again.branch, again.from_step, again.changes) == (None, None, [])
    assert again.lineage == "goes on with the branch from step 40 of attempt 2" and stored(run)["resume_from"] is None
    longer = start(run, **words, max_steps=200)
    assert longer.branch is None and longer.changes == ["max_steps: 100 -> 200"]
    assert start(run, **SLOWER, max_steps=200).lineage == "", "without resume_from, too"
    assert len(branches_of(read_attempts(run))) == 1
    # Negative controls: another rate, another step or another reason is another branch.
    for other in (
        {"trainer": {"betas": [0.9, 0.999], "lr": 1e-7}, "resume_from": 40},
        {"trainer": {"betas": [0.9, 0.999], "lr": 1e-7}, "resume_from": 20},
        {"trainer": {"betas": [0.9, 0.999], "lr": 1e-7}, "resume_from": 20, "resume_reason": "again"},
    ):
        assert start(run, **other).branch is not None
        settle_branch(run)
        assert start(run, **other).branch is None
    assert [branch["from"] for branch in branches_of(read_attempts(run))] == [40, 40, 20, 20]


def test_the_latest_step_is_resolved_once(tmp_path: Path) -> None:
    run = with_steps(tmp_path / "demo", 20, 60)
    words = {**SLOWER, "resume_from": "latest"}
    assert start(run, **words).from_step == 60 and stored(run)["resume_from"] == 60
    settle_branch(run)
    (run / "checkpoints/step_000080").mkdir()
    assert start(run, **words).branch is None, "goes on, though the latest step is another by now"
    assert start(run, **{**words, "resume_from": 60}).branch is None


@pytest.mark.parametrize("given", [{}, {"resume_from": 40}, {"resume_from": 40, "max_steps": 120}])
def test_a_branch_killed_before_its_work_was_set_aside_begins_again(tmp_path: Path, given: dict[str, Any]) -> None:
    run = with_steps(tmp_path / "demo", 20, 40, 60)
    start(run, **SLOWER, resume_from=40)
    for attempt in (3, 4):
        again = start(run, **SLOWER, **given)
        assert (again.attempt, again.from_step, again.branch) == (attempt, 40, None)
        assert stored(run)["resume_from"] == 40
    assert [branch["attempt"] for branch in branches_of(read_attempts(run))] == [2]


def test_a_launch_killed_while_it_opens_a_branch(tmp_path: Path) -> None:
    """After config.yaml, before facts.json: the branch is open, and the next start records it."""
    run = with_steps(tmp_path / "demo", 20, 40, 60)
    facts = (run / "facts.json").read_bytes()
    start(run, **SLOWER, resume_from=40)
    (run / "facts.json").write_bytes(facts)
    assert start(run, **SLOWER).from_step == 40
    assert [(branch["attempt"], branch["from"]) for branch in branches_of(read_attempts(run))] == [(3, 40)]


def test_a_finished_run_may_be_branched_from(tmp_path: Path) -> None:
    run = with_steps(tmp_path / "demo", 80, 100)
    finish_run(run, 100, 100, "trained 100 steps")
    assert start(run).kind == "finished"
    assert lines_of(run, **SLOWER, resume_from="latest") == [
        "resume_from: step 100 is the run's last, with max_steps=100; raise max_steps, or choose an earlier step "
        "(checkpoints of steps 80, 100)"
    ]
    assert start(run, **SLOWER, resume_from=80).from_step == 80 and not (run / "finished.json").exists()
    settle_branch(run)
    finish_run(run, 100, 100, "trained 100 steps")
    assert start(run, **SLOWER, resume_from=80).kind == "finished", "the branch is finished, too"
    assert start(run, **SLOWER, resume_from="latest", max_steps=150).from_step == 100


def test_a_step_without_a_checkpoint_is_refused_with_those_present(tmp_path: Path) -> None:
    run = with_steps(tmp_path / "demo", 20, 60)
    at = f"resume_from: {run} has checkpoints of steps 20, 60, none of step 40"
    assert lines_of(run, **SLOWER, resume_from=40) == [at]
    empty = with_steps(tmp_path / "empty")
    assert lines_of(empty, resume_from="latest") == [
        f"resume_from: {empty} has no checkpoint, there is none to begin from"
    ]
    assert lines_of(tmp_path / "none", resume_from=40) == [
        f"resume_from: 40, but {tmp_path / 'none'} holds no run to continue"
    ]
    assert not (tmp_path / "none").exists() and stored(run)["resume_from"] is None


def test_other_keys_stay_refused_with_both_values(tmp_path: Path) -> None:
    run = with_steps(tmp_path / "demo", 20)
    head, *lines = lines_of(run, **SLOWER, model={"path": "/models/other"}, seed=1, resume_from=20)
    assert "resume_from lets only the optimizer's and the loss's keys change" in head
    assert lines == ["  seed: 0 -> 1", '  model.path: null -> "/models/other"']
    head, *lines = lines_of(run, **SLOWER)
    assert "trainer.lr may change at a branch, with resume_from=latest or a checkpoint's step" in head
    assert lines == ["  trainer.lr: 1e-05 -> 1e-06"]


def test_a_key_that_the_command_line_does_not_give_is_refused(tmp_path: Path) -> None:
    run = with_steps(tmp_path / "demo", 20)
    config = CONFIG | SLOWER | {"resume_from": 20}
    for explicit in ((), ("trainer.betas",), ("rollout",)):
        with pytest.raises(ConfigError, match=r"trainer\.lr: 1e-05 -> 1e-06: the command line does not give it"):
            check_run(config, run, "auto", explicit)
    for explicit in (("trainer.lr",), ("trainer",)):
        assert check_run(config, run, "auto", explicit).from_step == 20


def test_the_temperature_may_change_unless_responses_wait(tmp_path: Path) -> None:
    cooler = {"rollout": {"temperature": 0.8, "max_staleness": 0}}
    run = with_steps(tmp_path / "demo", 20)
    assert start(run, **cooler, resume_from=20).changes == ["rollout.temperature: 1.0 -> 0.8"]
    ahead = CONFIG | {"rollout": {"temperature": 1.0, "max_staleness": 1}}
    run = with_steps(tmp_path / "ahead", 20, config=ahead)
    lines = lines_of(run, rollout={"temperature": 0.8, "max_staleness": 1}, resume_from=20)
    assert "checkpoint has responses drawn at the old one" in lines[1]


def test_branch_keys_exist_are_documented_and_free_no_other_key() -> None:
    documented = (Path(__file__).parents[1] / "docs/run_folder.md").read_text()
    values = Config().model_dump()
    for key in BRANCH_KEYS:
        functools.reduce(lambda at, name: at[name], key.split("."), values)
        assert f"`{key}`" in documented, key
    assert not set(BRANCH_KEYS) & {*MAY_CHANGE, *division_keys(values)}
    assert len(set(BRANCH_KEYS)) == len(BRANCH_KEYS)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (0, "expected at least 1, got 0"),
        ("-1", "expected at least 1, got '-1'"),
        ("newest", "expected 'latest', got 'newest'"),
        (1.5, "expected an integer, got a number with a fractional part, got 1.5"),
        (True, "expected a number, got True"),
        ([1], "expected an integer, got [1]"),
    ],
)
def test_a_wrong_step_is_one_line(wrong: Any, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse({"data": {"train": "task:sort_digits"}, "resume_from": wrong})
    assert error.value.problems == [f"resume_from: {text}"]


def test_starting_over_and_a_branch_contradict() -> None:
    with pytest.raises(ConfigError, match="resume=fresh starts another; give one of them"):
        parse({"data": {"train": "task:sort_digits"}, "resume_from": 20, "resume": "fresh"})


def test_status_shows_the_branches(tmp_path: Path) -> None:
    run = with_steps(tmp_path / "demo", 20, 40)
    start(run, **SLOWER, resume_from=40, resume_reason="diverged")
    settle_branch(run)
    start(run, **SLOWER, resume_from=20)
    rows = [line for line in status.describe(run, None, 0.0).splitlines() if "from step" in line]
    assert rows == [
        "branches attempt 3 from step 20: nothing changed",
        "         attempt 2 from step 40: trainer.lr: 1e-05 -> 1e-06 (diverged)",
    ]


@pytest.mark.parametrize("branch", [[], {"from": "x"}, {"changes": 3}, None, "40"])
def test_a_record_edited_by_hand_does_not_stop_a_start(tmp_path: Path, branch: Any) -> None:
    run = with_steps(tmp_path / "demo", 20)
    facts = json.loads((run / "facts.json").read_text())
    facts["attempts"][0]["branch"] = branch
    (run / "facts.json").write_text(json.dumps(facts))
    assert start(run, **SLOWER, resume_from=20).branch is not None


def test_adapted_coefficients_start_again_if_their_keys_change() -> None:
    held = {"actor/kl_scale": 2.0, "actor/entropy_coef": 0.1, "_entropy_level": 0.1, "_reward_moments/mean/math": 0.5}
    assert after_changes(held, {"trainer.lr"}) == held
    assert set(after_changes(held, {"algorithm.kl_target"})) == set(held) - {"actor/kl_scale"}
    left = after_changes(held, {"algorithm.entropy_loss_coef", "algorithm.pg_clip_low"})
    assert left == {"actor/kl_scale": 2.0, "_reward_moments/mean/math": 0.5}
