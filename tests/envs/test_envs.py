"""Arguments of an environment, and which domains may have one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import Config, EnvConfig, parse
from hpcrl.data import read_splits
from hpcrl.envs.environment import begin
from hpcrl.envs.factory import env_class, make_env, validate_envs

ROW = {"prompt": "?", "answer": "4", "messages": [], "extra": {"level": 3, "answer": "ignored", "size": 9}}


class Unplayed:
    """An environment that is only constructed."""

    def reset(self, seed: int) -> None: ...

    def step(self, action: str) -> None: ...


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
def test_columns_and_options_are_passed_to_the_environment(name: str, options: dict, made_with: dict) -> None:
    config = EnvConfig(name="class", class_path=f"tests.envs.test_envs:{name}", options=options)
    assert env_class(config) is not None
    assert make_env(config, ROW).made_with == made_with  # type: ignore[attr-defined]


def test_a_missing_column_and_an_unknown_option_are_errors() -> None:
    config = EnvConfig(name="class", class_path="tests.envs.test_envs:Named")
    with pytest.raises(TypeError, match="level"):
        make_env(config, {**ROW, "extra": {}})
    with pytest.raises(ValueError, match=r"env\.maze\.options: Named .*'colour'"):
        env_class(config.model_copy(update={"options": {"colour": "red"}}), "maze")


def test_an_environment_for_a_domain_without_prompts_is_named() -> None:
    data = {"train": [{"path": "task:add", "domain": "maze"}, {"path": "task:add", "domain": "plain"}]}
    env = {"maze": {}, "mazes": {}, "default": {}, "plain": None}
    config = parse({"data": data, "env": env})
    rows, problems = read_splits(config.data, config.seed)
    assert problems == []
    assert validate_envs(config, rows) == ["env.mazes: no prompt has this domain; there are: maze, plain"]
    assert validate_envs(Config(env={"default": EnvConfig()}), rows) == []
    assert [config.env_of(domain) is None for domain in ("maze", "plain", "other")] == [False, True, False]


class Keyword(Unplayed):
    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:  # type: ignore
        return f"seed {seed}", {}


class Old(Unplayed):
    def reset(self) -> str:  # type: ignore[override]
        return ""


class Positional(Unplayed):
    def reset(self, start: int, /) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        return f"seed {start}", {}


@pytest.mark.parametrize("name", ["Keyword", "Positional"])
def test_the_seed_is_passed_in_the_form_that_reset_takes(name: str) -> None:
    env = make_env(EnvConfig(name="class", class_path=f"tests.envs.test_envs:{name}"), ROW)
    assert begin(env, 7) == ("seed 7", {})


def test_a_reset_without_a_seed_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reset\(\) must take a seed, as in reset\(self, seed\)"):
        env_class(EnvConfig(name="class", class_path="tests.envs.test_envs:Old"))


MINE = """
class Mine:
    def __init__(self, size=1):
        self.size = size

    def reset(self, seed):
        return "", {}

    def step(self, action):
        return "", 0.0, True, False, {}
"""


def test_a_class_can_be_loaded_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    config = EnvConfig(name="class", class_path=f"{tmp_path}/mine.py:Mine", options={"size": 3})
    first, second = make_env(config, ROW), make_env(config, ROW)
    assert first.size == 3 and type(first) is type(second), "the file is executed once"  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "options", "problem"),
    [
        ("mine.py:Mine", {}, ""),
        ("mine.py:Mime", {}, "env.maze.class_path: .*mine.py' has no attribute 'Mime'|AttributeError"),
        ("nine.py:Mine", {}, "env.maze.class_path: .*no such file"),
        ("mine.py:Mine", {"colour": "red"}, "env.maze.options: Mine .*'colour'"),
        ("broken.py:Mine", {}, "env.maze.class_path: .*running the file failed: ZeroDivisionError"),
        ("leaves.py:Mine", {}, "env.maze: the process that loads it ends"),
    ],
)
def test_a_dry_run_notices_a_missing_class(path: str, options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "leaves.py").write_text("import os\nos._exit(3)")
    config = parse({"env": {"maze": {"name": "class", "class_path": f"{tmp_path}/{path}", "options": options}}})
    lines = validate_envs(config, {})
    assert len(lines) == bool(problem) and all(re.search(problem, line) for line in lines), lines


def test_a_class_can_ask_for_the_limit_of_turns() -> None:
    lake = make_env(EnvConfig(name="frozen_lake", max_turns=7), ROW | {"extra": {}})
    assert "Turns left: 7." in str(lake.reset(0)[0]) and str(lake.step("?")[0]).startswith("Turn 2, 6 left:")
