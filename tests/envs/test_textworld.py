"""Games of TextWorld's generator, by hand and through the environment contract; names as in ALFWorld."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.config import EnvConfig, parse
from hpcrl.data.env_sources import HALF
from hpcrl.envs.factory import make_env, validate_envs
from tests.contracts import test_env as contract

pytestmark = pytest.mark.skipif(find_spec("textworld") is None, reason="textworld is not installed")

PLAIN = {"prompt": "{observation}", "turn": "{observation}", "invalid": "{observation}", "tag": ""}
WALK = contract.tagged("look", "go south", "inventory", "go north")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A game of two rooms, twice."""
    import textworld

    made = tmp_path_factory.mktemp("games")
    options = textworld.GameOptions()
    options.seeds, options.nb_rooms, options.nb_objects, options.quest_length = 1, 2, 4, 2
    options.path = str(made / "1.z8")
    textworld.make(options)
    for end in ("z8", "json"):
        shutil.copy(made / f"1.{end}", made / f"2.{end}")
    return made


def game(folder: Path, row: dict[str, Any] | None = None, **options: Any) -> Any:
    config = EnvConfig(name="textworld", options=PLAIN | {"games": [str(folder)]} | options)
    return make_env(config, {"extra": row or {}})


@pytest.mark.slow
def test_the_environment_contract_holds(folder: Path) -> None:
    case = contract.Case("textworld", {"games": [str(folder)]}, WALK)
    contract.test_an_episode_is_a_function_of_seed_and_actions(case)
    contract.test_concurrent_episodes_do_not_affect_each_other(case)
    contract.test_close_works_at_any_time_and_ends_no_other_episode(case)
    for response in contract.HOSTILE[::4]:
        contract.test_an_invalid_action_changes_nothing_and_is_counted(case, response)
    contract.test_texts_come_from_options(case)


@pytest.mark.slow
def test_a_game_by_hand(folder: Path) -> None:
    first, second = str(folder / "1.z8"), str(folder / "2.z8")
    env = game(folder, {"game": first}, prompt="{task}|{observation}")
    task, text = env.reset(0)[0].split("|")
    assert text.startswith(task) and "go south" in task and "close the bureau" in task and "$$" not in text
    assert "\n>" not in text and "-=" in text and "go south" in env.actions
    assert env.step("xyzzy")[4]["metrics"] == {"success": 0.0, "action_is_valid": 0.0, "action_is_effective": 0.0}
    env.step("look")
    text, reward, *ended, info = env.step("GO SOUTH")
    assert text.startswith("-= Studio =-") and (reward, ended) == (0.0, [False, False])
    assert info["metrics"] == {"success": 0.0, "action_is_valid": 2 / 3, "action_is_effective": 1 / 3}
    *_, reward, terminated, _, info = env.step("close bureau")
    assert (reward, terminated, info["metrics"]["success"]) == (1.0, True, 1.0)
    scored = game(folder, {"game": first}, reward="score")
    scored.reset(0)
    assert [scored.step(command)[1] for command in ("go south", "close bureau")] == [0.0, 1.0]
    drawn = game(folder, games=[first], val_games=[second])
    files = []
    for seed in (0, 5, HALF, HALF + 3):
        drawn.reset(seed)
        files.append(drawn.game)
    assert files == [first, first, second, second]
    for played in (env, scored, drawn):
        played.close()


def test_things_are_named_like_in_alfworld() -> None:
    from hpcrl.envs.adapters.textworld import _name_things

    ids = ["mug_bar__minus_00_dot_80", "mug_bar__plus_01_dot_00", "sink_bar_1_bar_sinkbasin", "agent1", "a_minus_b"]
    things = {name: SimpleNamespace(id=name, name=name) for name in ids}
    _name_things(SimpleNamespace(_entity_infos=things))
    assert [things[name].name for name in ids] == ["mug 2", "mug 1", "sinkbasin 1", "agent1", "a-b"]


def test_missing_games_and_packages_are_named_before_the_start(tmp_path: Path) -> None:
    def problem(**options: Any) -> str:
        config = parse({"env": {"default": {"name": "textworld", "options": options}}})
        (line,) = validate_envs(config, {})
        return line

    (tmp_path / "empty").mkdir()
    (tmp_path / "alone.z8").write_bytes(b"")
    (tmp_path / "game.txt").write_bytes(b"")
    assert "games: give files (made by tw-make" in problem()
    assert f"env.default.options.games: there is no game in '{tmp_path}/empty'" in problem(
        games=[str(tmp_path / "empty")]
    )
    assert f"there is no game in '{tmp_path}/none.z8'" in problem(games=[str(tmp_path / "none.z8")])
    assert "alone.z8' needs the file alone.json beside it" in problem(games=[str(tmp_path / "alone.z8")])
    assert "game.txt' is not a game" in problem(games=[str(tmp_path / "game.txt")])


def test_alfworld_games_that_no_planner_solved_are_skipped(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "game.tw-pddl").write_text(json.dumps({"solvable": False}))
    with pytest.raises(ValueError, match="none of the 2 games can be solved"):
        game(tmp_path).reset(0)
