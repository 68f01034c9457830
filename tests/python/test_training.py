"""hpcrl.plan and hpcrl.train without ranks: the plan's numbers, refusals, submissions to a Slurm of fake commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import hpcrl
from hpcrl.config import ConfigError
from hpcrl.launch.__main__ import main
from hpcrl.python.nesting import INSIDE
from tests import in_process
from tests.conftest import ROOT
from tests.launch.test_submission import make_slurm

REWARD = "def score(completions, **columns):\n    return [float(len(text)) for text in completions]\n"
KEYS: dict[str, Any] = {"experiment": "demo", "layout": "disaggregated", "max_steps": 3, "trainer": {"lr": 1e-3}}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "my_reward.py").write_text(REWARD)
    return tmp_path


def test_a_plan_is_that_of_the_command_with_its_numbers(place: Path) -> None:
    words = ["+experiment=demo", "layout=disaggregated", "max_steps=3", "trainer.lr=1e-3", "run_name=p"]
    told = in_process.run(main, *words, "dry_run=true", at=place).stdout
    plan = hpcrl.plan(**KEYS, run_name="p")
    assert told == f"{plan}\n\ndry_run: nothing was started or written\n"
    assert plan.kind == "fresh" and plan.run_dir == place / "runs" / "p" and plan.config["max_steps"] == 3
    assert plan.memory_bytes and plan.memory_bytes.keys() == {
        rank for r in ("trainer", "generator") for rank in plan.roles[r]
    }
    assert plan.roles["controller"] == (0,) and plan.responses_per_step == 64 * 8
    assert plan.num_parameters == 119360 and plan.node_hours is None and not plan.refusals
    assert plan.checkpoint_bytes == pytest.approx(119360 * 12, abs=1024), "fp32 weights and two moments"
    assert not (place / "runs").exists()


def test_a_plan_leaves_the_callers_modules_and_search_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.delitem(sys.modules, "my_reward", raising=False)
    import my_reward  # type: ignore[import-not-found]

    path = list(sys.path)
    plan = hpcrl.plan(**KEYS, reward=my_reward.score)
    assert plan.config["reward"]["default"]["function"] == f"{place}/my_reward.py:score"
    assert sys.modules["my_reward"] is my_reward and sys.path == path
    hpcrl.plan(**KEYS, reward=my_reward.score)  # it is still the module's function


def test_node_hours_of_a_job(place: Path) -> None:
    keys = {"experiment": "demo", "cluster": "slurm"}
    assert hpcrl.plan("cluster.time=02:00:00", **keys).node_hours == 2.0


def test_a_wrong_key_is_refused_by_plan_and_train_alike(place: Path) -> None:
    wrong: dict[str, Any] = {**KEYS, "trainer": {"lr": -1, "leraning_rate": 1}}
    with pytest.raises(ConfigError) as planned:
        hpcrl.plan(**wrong)
    with pytest.raises(hpcrl.RunFailed) as started:
        hpcrl.train(**wrong)
    assert started.value.exit_code == 2 and len(started.value.problems) == 2
    assert started.value.problems == planned.value.problems
    assert "\n" not in str(started.value) and not (place / "runs").exists()


def test_an_evaluation_of_nothing_is_refused(place: Path) -> None:
    with pytest.raises(hpcrl.RunFailed, match="nowhere/model/x: no such folder") as error:
        hpcrl.evaluate("nowhere/model/x", data={"val": "task:sort_digits"})
    assert error.value.exit_code == 2
    with pytest.raises(ValueError, match=r"dry_run: .*; hpcrl\.evaluate starts it"):
        hpcrl.evaluate("runs/x", dry_run=True)


@pytest.mark.parametrize("call", ["plan", "train"])
def test_a_file_that_calls_hpcrl_when_a_run_imports_it_is_refused_once(place: Path, call: str) -> None:
    given = {**KEYS, "reward": "looping.py:score"}
    (place / "looping.py").write_text(f"{REWARD}import hpcrl\nhpcrl.{call}(**{given!r})\n")
    with pytest.raises((ConfigError, hpcrl.RunFailed)) as error:
        getattr(hpcrl, call)(**given)
    (line,) = str(error.value).splitlines()
    assert f"hpcrl.{call} is called by a file that a run of hpcrl imports" in line and line.startswith("reward.default")
    assert INSIDE not in os.environ and not (place / "runs").exists()


@pytest.mark.parametrize("word", ["dry_run=true", "++dry_run=True"])
def test_a_dry_run_is_for_plan(place: Path, word: str) -> None:
    with pytest.raises(ValueError, match=r"dry_run: hpcrl\.plan returns the plan"):
        hpcrl.train(word, **KEYS)


@pytest.mark.slow
def test_a_job_is_submitted_once_and_can_be_stopped(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_slurm(place)
    (place / "bin" / "scancel").write_text(f'#!/bin/bash\necho "$@" > {place}/cancelled\n')
    (place / "bin" / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}/bin{os.pathsep}{os.environ['PATH']}")
    keys: dict[str, Any] = {
        "cluster": "slurm",
        "data": {"train": "task:sort_digits"},
        "run_dir": "run",
        "model": "tiny",
    }
    run = hpcrl.train(**keys, reward="my_reward.py:score")
    assert run.job_id == 9 and run.state == "queued" and run.path == place / "run"
    assert (
        run.config["reward"]["default"] | {"function": "my_reward.py:score", "name": "function"}
        == run.config["reward"]["default"]
    )
    assert "job 9 is submitted" in capsys.readouterr().out
    with pytest.raises(hpcrl.RunFailed, match="belongs to job 9") as error:
        hpcrl.train(**keys, reward="my_reward.py:score")
    assert error.value.exit_code == 2
    assert run.stop() and (place / "cancelled").read_text() == "9\n"
    make_slurm(place, suffix=";there")
    elsewhere = hpcrl.train(**keys | {"run_dir": "other"}, reward="my_reward.py:score")
    with pytest.raises(ValueError, match="job 10: run this on cluster there, not on here"):
        elsewhere.stop()


GAME = """\
class Say:
    def reset(self, seed):
        return "say a", {}

    def step(self, action):
        return "", float("a" in action), True, False, {}
"""


def test_an_environment_may_be_a_class_of_a_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "games.py").write_text(GAME)
    monkeypatch.syspath_prepend(str(place))
    games = __import__("games")
    try:
        plan = hpcrl.plan(experiment="agentic_tiny", env=games.Say, model="tiny")
    finally:
        del sys.modules["games"]
    env = plan.config["env"]["default"]
    assert (env["name"], env["class_path"]) == ("class", f"{place}/games.py:Say") and "environment class" in str(plan)
