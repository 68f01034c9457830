"""What an environment is made with, and which domains may have one."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config import Config, EnvConfig, parse
from hpcrl.data import read_splits
from hpcrl.envs.making import env_class, make_env, validate_envs

ROW = {"prompt": "?", "answer": "4", "messages": [], "extra": {"level": 3, "answer": "ignored", "size": 9}}


class Unplayed:
    """An environment that is made only."""

    reset = step = None


class Named(Unplayed):
    def __init__(self, level: int, answer: Any, size: int = 1):
        self.made_with = {"level": level, "answer": answer, "size": size}


class Everything(Unplayed):
    def __init__(self, **columns: Any):
        self.made_with = columns


@pytest.mark.parametrize(
    ("name", "options", "made_with"),
    [
        ("Named", {}, {"level": 3, "answer": "4", "size": 9}),
        ("Named", {"size": 5}, {"level": 3, "answer": "4", "size": 5}),  # an option goes before a column
        ("Everything", {"x": 1}, {"level": 3, "answer": "4", "size": 9, "prompt": "?", "messages": [], "x": 1}),
    ],
)
def test_columns_and_options_reach_the_environment(name: str, options: dict, made_with: dict) -> None:
    config = EnvConfig(name="class", class_path=f"tests.envs.test_envs:{name}", options=options)
    assert env_class(config) is not None
    assert make_env(config, ROW).made_with == made_with  # type: ignore[attr-defined]


def test_what_a_column_is_missing_for_and_an_unknown_option_are_errors() -> None:
    config = EnvConfig(name="class", class_path="tests.envs.test_envs:Named")
    with pytest.raises(TypeError, match="level"):
        make_env(config, {**ROW, "extra": {}})
    with pytest.raises(ValueError, match=r"env\.maze\.options: Named .*'colour'"):
        env_class(config.model_copy(update={"options": {"colour": "red"}}), "maze")


def test_an_environment_of_a_domain_that_no_prompt_has_is_named() -> None:
    data = {"train": [{"path": "task:add", "tag": "maze"}, {"path": "task:add", "tag": "plain"}]}
    env = {"maze": {}, "mazes": {}, "default": {}, "plain": None}
    config = parse({"data": data, "env": env})
    rows, problems = read_splits(config.data, config.seed)
    assert problems == []
    assert validate_envs(config, rows) == ["env.mazes: no prompt has this domain; there are: maze, plain"]
    assert validate_envs(Config(env={"default": EnvConfig()}), rows) == []
    assert [config.env_of(domain) is None for domain in ("maze", "plain", "other")] == [False, True, False]
