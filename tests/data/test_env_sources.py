"""Rows of environments: one start per group, different starts otherwise, experts that play by the rules."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config import EnvConfig, parse
from hpcrl.data import read_splits
from hpcrl.data.env_sources import HALF, SEED_COLUMN
from hpcrl.data.tasks import make_task
from hpcrl.envs.factory import make_env, validate_envs
from hpcrl.rewards.serving.router import validate_rewards


def rows(path: str, split: str = "train", seed: int = 0, count: int = 50, **options: Any) -> list[dict[str, Any]]:
    task = make_task(path, options, None, seed, split)  # type: ignore[arg-type]
    return [task.row(index) for index in range(count)]


def test_train_and_validation_starts_differ_under_any_seeds() -> None:
    train = {row[SEED_COLUMN] for seed in range(3) for row in rows("env:maze", "train", seed, 500)}
    val = {row[SEED_COLUMN] for seed in range(3) for row in rows("env:maze", "val", seed, 500)}
    assert len(train) == len(val) == 1500, "no start comes twice"
    assert max(train) < HALF <= min(val) and max(val) < 1 << 31
    assert rows("env:maze") == rows("env:maze") != rows("env:other")
    assert rows("env:maze")[0] == {"prompt": "maze 265210728", SEED_COLUMN: 265210728}, "starts never change"


@pytest.mark.parametrize(
    ("name", "env"),
    [("frozen_lake", {"size": 5}), ("sokoban", {}), ("guess", {"high": 20}), ("tic_tac_toe", {"tag": ""})],
)
def test_an_expert_plays_the_episode_of_its_row(name: str, env: dict[str, Any]) -> None:
    """Its dialogue is the environment's replies to its answers, from the start that env:NAME has at this index."""
    won = 0
    for traced, started in zip(rows(f"expert:{name}", env=env), rows(f"env:{name}"), strict=True):
        game = make_env(EnvConfig(name=name, options=env, max_turns=10), {"extra": {}})  # as expert: has by default
        said, *others = [turn["content"] for turn in traced["messages"]]
        assert game.reset(started[SEED_COLUMN])[0] == said
        for answer, following in zip(others[::2], [*others[1::2], None], strict=True):
            observation, _, _, _, info = game.step(answer)
            assert following is None or observation == following
        won += info["metrics"]["success"]
        assert info["metrics"]["action_is_valid"] == 1.0 and len(traced["messages"]) <= 20
    assert won > 35, "a few rooms take more than ten turns"


@pytest.mark.parametrize("form", ["auto", "llama3_json", "mistral"])
def test_a_tool_experts_calls_are_answered(form: str) -> None:
    """The calls find each of seven numbers in three turns; the rows contain the tool and its results."""
    options = {"tools": ["guess"], "highest": 7, "prompt": "Find the number from 1 to 7.", "format": form}
    for traced, started in zip(rows("expert:tools", env=options), rows("env:tools"), strict=True):
        played = make_env(EnvConfig(name="tools", options=options), {"messages": [], "extra": {}})
        observation, info = played.reset(started[SEED_COLUMN])
        asked, *others = traced["messages"]
        assert asked == {"role": "user", "content": observation} and traced["tools"] == info["tools"]
        for answer, following in zip(others[::2], [*others[1::2], None], strict=True):
            said, _, ended, _, info = played.step(answer["content"])
            assert ended if following is None else said == [following]
        assert len(others) <= 5 and info["metrics"] == {
            "success": 1.0,
            "tool_calls": float(len(others) // 2 + 1),
            "invalid_calls": 0.0,
            "tool_errors": 0.0,
        }
    calls = [row["messages"][1]["content"] for row in rows("expert:tools", env=options)]
    assert all(call.count("4") == 1 for call in calls), "the middle of 1 to 7 comes first"


@pytest.mark.slow
def test_noise_of_a_tool_expert_is_any_number() -> None:
    options = {"tools": ["guess"], "highest": 7, "prompt": "Find it."}
    guesses = [row["messages"][1]["content"] for row in rows("expert:tools", count=210, noise=1.0, env=options)]
    counts = {number: sum(f'"number": {number}}}' in guess for guess in guesses) for number in range(1, 8)}
    assert sum(counts.values()) == 210 and min(counts.values()) >= 15, counts


def test_noise_and_number_of_turns_are_as_configured() -> None:
    best = rows("expert:frozen_lake", count=200)
    noisy = rows("expert:frozen_lake", count=200, noise=0.6, max_turns=3)
    agreeing = [a["messages"][1] == b["messages"][1] for a, b in zip(best, noisy, strict=True)]
    assert 0.45 < sum(agreeing) / 200 < 0.65  # 0.4 + 0.6 / 4, and often two ways are equally short
    assert max(len(row["messages"]) for row in noisy) == 6


@pytest.mark.parametrize(
    ("path", "options", "problem"),
    [
        ("env:maze", {"size": 4}, "env:maze: give the environment's options in env.maze.options"),
        ("expert:maze", {}, "expert:maze: no such environment has an expert; there are frozen_lake, sokoban"),
        ("expert:scripted", {}, "expert:scripted: no such environment has an expert"),
        (
            "expert:sokoban",
            {"noize": 1},
            "there is no option 'noize' (there are: env, noise, max_turns)",
        ),
        ("expert:sokoban", {"env": {"size": 2}}, "expert:sokoban: size: Input should be greater than or equal to 5"),
        ("expert:tools", {"env": {"tools": ["python"]}}, "expert:tools: tools: only [guess] has an expert"),
        ("expert:tools", {"env": {"tools": ["guess"]}}, "expert:tools: prompt: give a text without {prompt}"),
    ],
)
def test_a_wrong_source_is_named_before_the_start(path: str, options: dict[str, Any], problem: str) -> None:
    config = parse({"data": {"train": [{"path": path, "options": options}]}})
    _, (line,) = read_splits(config.data, 0)
    assert line.startswith("data.train: ") and problem in line


def test_starts_without_an_environment_name_what_is_missing() -> None:
    data = {"train": [{"path": "env:frozen_lake", "domain": "lake"}]}
    config = parse({"data": data, "env": {"frozen_lake": None}})
    found, problems = read_splits(config.data, 0)
    assert problems == validate_rewards(config, found) == []
    lines = validate_envs(config, found)
    assert "data.train: env:frozen_lake gives starts of an environment; set env.lake.name or env.default.name" in lines
    played = parse({"data": data, "env": {"lake": {"name": "frozen_lake"}}})
    assert validate_rewards(played, found) == validate_envs(played, found) == []
