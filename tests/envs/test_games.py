"""The rules of the built-in games on hand-made boards, and solvable starts."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest

from hpcrl.config import EnvConfig, parse
from hpcrl.envs.factory import make_env, validate_envs
from hpcrl.envs.games.frozen_lake import FrozenLake
from hpcrl.envs.games.sokoban import Sokoban
from hpcrl.envs.games.tic_tac_toe import TicTacToe
from hpcrl.envs.spec import FrozenLakeOptions, SokobanOptions

PLAIN = {"prompt": "{observation}", "turn": "{observation}", "invalid": "{observation}", "tag": ""}


def game(name: str, **options: Any) -> Any:
    return make_env(EnvConfig(name=name, options=PLAIN | options), {"extra": {}})


def lake(**options: Any) -> FrozenLake:
    """P _ _
    O _ O
    _ _ G"""
    env: FrozenLake = game("frozen_lake", size=3, **options)
    env.reset(0)
    env.player, env.goal, env.holes = (0, 0), (2, 2), {(1, 0), (1, 2)}
    return env


def test_frozen_lake_by_hand() -> None:
    env = lake()
    assert env.show() == "P__\nO_O\n__G"
    seen = [env.step(word)[:4] for word in ("Left", "right", "Down", "Down", "Right")]
    assert [text.split("\n") for text, *_ in seen] == [
        ["P__", "O_O", "__G"],  # over the edge
        ["_P_", "O_O", "__G"],
        ["___", "OPO", "__G"],
        ["___", "O_O", "_PG"],
        ["___", "O_O", "__√"],
    ]
    assert [reward for _, reward, _, _ in seen] == [0, 0, 0, 0, 1]
    assert [ended for _, _, ended, _ in seen] == [False] * 4 + [True]
    fallen = lake()
    text, reward, ended, _, info = fallen.step("Down")
    assert (text, reward, ended) == ("___\nX_O\n__G", 0.0, True)
    assert info["metrics"] == {"success": 0.0, "action_is_valid": 1.0, "action_is_effective": 1.0}


def test_turn_texts_can_list_positions() -> None:
    env = lake(turn="{observation}\n{places}")
    assert env.step("Right")[0] == "_P_\nO_O\n__G\nP0,1 G2,2"
    env.player = (2, 1)
    assert env.step("Right")[0].endswith("√2,2 √2,2")
    solved = room("######", "#P___#", "#_X√_#", "#_O__#", "#____#", "######")
    solved.options = SokobanOptions(turn="{observation}\n{places}", tag="")
    assert solved.step("Right")[0].endswith("\nP1,2 X2,2 √2,3 √2,3 O3,2"), "you, the boxes, the targets"


def test_slippery_ice_moves_to_each_of_three_sides_equally_often() -> None:
    ended: Counter[tuple[int, int]] = Counter()
    for seed in range(3000):
        env = game("frozen_lake", size=3, slippery=True)
        env.reset(seed)
        env.player, env.goal, env.holes = (1, 1), (2, 2), set()
        env.step("Up")
        ended[env.player] += 1
    assert ended.keys() == {(0, 1), (1, 0), (1, 2)} and all(900 < count < 1100 for count in ended.values())


@pytest.mark.parametrize(("size", "frozen"), [(2, 0.0), (4, 0.8), (4, 0.3), (8, 0.8), (8, 0.0)])
def test_every_lake_can_be_crossed(size: int, frozen: float) -> None:
    starts = set()
    for seed in range(100):
        env = game("frozen_lake", size=size, frozen=frozen)
        starts.add(env.reset(seed)[0])
        for word in env.way():
            *_, ended, _, info = env.step(word)
        assert ended and info["metrics"]["success"] == 1.0
    assert len(starts) > {2: 4, 4: 90, 8: 70}[size]


def room(*rows: str) -> Sokoban:
    """A room of this picture, in the default symbols."""
    env: Sokoban = game("sokoban")
    env.reset(0)
    cells = {(r, c): symbol for r, row in enumerate(rows) for c, symbol in enumerate(row)}
    env.floor = {place for place, symbol in cells.items() if symbol != "#"}
    env.targets = frozenset(place for place, symbol in cells.items() if symbol in "O√S")
    env.boxes = frozenset(place for place, symbol in cells.items() if symbol in "√X")
    (env.player,) = (place for place, symbol in cells.items() if symbol in "PS")
    return env


def test_sokoban_by_hand() -> None:
    env = room("######", "#P_O_#", "#_X__#", "#XO__#", "#____#", "######")
    seen = [env.step(word)[:3] for word in ("Left", "Right", "Down", "Down")]
    assert [reward for _, reward, _ in seen] == [-0.1, -0.1, pytest.approx(0.9), pytest.approx(-1.1)]
    assert seen[0][0] == "######\n#P_O_#\n#_X__#\n#XO__#\n#____#\n######", "a wall stops you"
    assert seen[2][0] == "######\n#__O_#\n#_P__#\n#X√__#\n#____#\n######", "the box is on the target"
    assert seen[3][0] == "######\n#__O_#\n#____#\n#XS__#\n#_X__#\n######", "and pushed off it"
    assert env.step("Down")[0] == seen[3][0], "a wall stops a box"
    beside = room("######", "#PXX_#", "#OO__#", "#____#", "#____#", "######")
    assert beside.step("Right")[0] == beside.show() and beside.boxes == {(1, 2), (1, 3)}, "a box stops a box"


def test_sokoban_ends_with_the_last_box() -> None:
    env = room("######", "#PXO_#", "#____#", "#____#", "#____#", "######")
    text, reward, ended, _, info = env.step("Right")
    assert reward == pytest.approx(-0.1 + 1 + 10) and ended and info["metrics"]["success"] == 1.0
    assert text.startswith("######\n#_P√_#")


def test_a_box_in_a_corner_makes_a_room_unsolvable() -> None:
    env = room("######", "#X_O_#", "#P___#", "#____#", "#____#", "######")
    assert env.solution() is None and env.best_action() in env.actions


@pytest.mark.parametrize(("size", "boxes"), [(6, 1), (8, 2), (6, 2), (10, 1)])
def test_every_room_can_be_solved(size: int, boxes: int) -> None:
    """By a search that uses only the rules of step(), not how the room was made."""
    lengths = []
    for seed in range(40 if boxes == 1 else 10):
        env = game("sokoban", size=size, num_boxes=boxes)
        first, _ = env.reset(seed)
        assert len(first.split("\n")) == size and first.count("X") == first.count("O") + first.count("S") == boxes
        way = env.solution()
        for word in way:
            *_, ended, _, info = env.step(word)
        assert ended and info["metrics"]["success"] == 1.0
        lengths.append(len(way))
    assert max(lengths) >= 5 and sum(lengths) / len(lengths) > 2.5, "rooms are no single push"


def test_binary_search_finds_the_number() -> None:
    env = game("guess", high=100, turn="The number is {observation}.")
    for seed in range(50):
        env.reset(seed)
        for _ in range(7):
            text, reward, ended, _, info = env.step(env.best_action())
            if ended:
                break
        assert (ended, reward, text) == (True, 1.0, "The number is found.")
        assert info["metrics"]["action_is_effective"] == 1.0
    env.reset(0)
    env.number = 50
    assert [env.step(word)[0] for word in ("60", "40")] == ["The number is lower.", "The number is higher."]
    assert env.step("30")[4]["metrics"]["action_is_effective"] == pytest.approx(2 / 3), "30 was ruled out"
    assert [env.step(word)[4]["metrics"]["action_is_valid"] for word in ("101", "050")] == [0.75, 0.6]


def test_neither_a_perfect_opponent_nor_a_perfect_player_ever_loses() -> None:
    def explore(env: TicTacToe, board: str, results: Counter[float]) -> None:
        for action in (action for action in env.actions if board[int(action) - 1] == " "):
            env.reset(0)
            env.board = board
            _, reward, ended, _, _ = env.step(action)
            if ended:
                results[reward] += 1
            else:
                explore(env, env.board, results)

    results: Counter[float] = Counter()
    explore(game("tic_tac_toe", opponent="perfect"), " " * 9, results)
    assert results[1.0] == 0 and results[0.0] > 50 and results[0.5] > 50
    env, mine = game("tic_tac_toe", begins=False), Counter[float]()
    for seed in range(200):
        env.reset(seed)
        ended = False
        while not ended:
            _, reward, ended, _, _ = env.step(env.best_action())
        mine[reward] += 1
    assert mine[0.0] == 0 and mine[1.0] > 100


def test_a_response_without_an_action_costs_more_than_a_move_in_sokoban() -> None:
    """Otherwise an agent that cannot solve its rooms learns to give no action."""
    env = game("sokoban")
    env.reset(0)
    nothing = env.step("nothing at all")[1]
    assert nothing < env.step("Up")[1] == -0.1


def test_choosing_a_taken_cell_changes_nothing() -> None:
    env = game("tic_tac_toe", opponent="perfect")
    env.reset(0)
    board, *_ = env.step("5")
    text, reward, ended, _, info = env.step("5")
    assert (text, reward, ended) == (board, -0.05, False)
    assert info["metrics"] == {"success": 0.0, "action_is_valid": 1.0, "action_is_effective": 0.5}


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("scripted", {"size": 3}, "there is no option 'size' (there are: feedback)"),
        ("frozen_lake", {"sise": 3}, "there is no option 'sise' (there are: prompt, turn, invalid, tag"),
        ("frozen_lake", {"size": 1}, "size: Input should be greater than or equal to 2"),
        ("frozen_lake", {"frozen": 1.5}, "frozen: Input should be less than or equal to 1"),
        ("frozen_lake", {"symbols": "PP OGX"}, "symbols: 'PP OGX' must be different visible characters"),
        ("frozen_lake", {"symbols": "P"}, "symbols: String should have at least 6 characters"),
        ("frozen_lake", {"prompt": "Go."}, "prompt: the text must contain {observation}"),
        ("frozen_lake", {"turn": "{obs}"}, "turn: there is no field {obs} (there are: observation, actions"),
        ("guess", {"turn": "{observation} {places}"}, "turn: there is no field {places} (there are: observation, "),
        ("frozen_lake", {"tag": "a b"}, "tag: 'a b' is not the name of a tag"),
        ("frozen_lake", {"invalid_reward": 0.1}, "invalid_reward: Input should be less than or equal to 0"),
        (
            "sokoban",
            {"num_boxes": 4, "size": 5},
            "num_boxes=4 need 20 places of floor, and size=5 with",
        ),
        ("guess", {"low": 5, "high": 5}, "low=5 must be below high=5"),
        ("tic_tac_toe", {"opponent": "me"}, "opponent: Input should be 'random' or 'perfect'"),
    ],
)
def test_wrong_options_are_named_before_the_start(name: str, options: dict[str, Any], problem: str) -> None:
    config = parse({"env": {"default": {"name": name, "options": options}}})
    (line,) = validate_envs(config, {})
    assert line.startswith("env.default.options: ") and problem in line
    with pytest.raises(ValueError, match="options"):
        make_env(config.envs["default"], {"extra": {}})


def test_the_expert_errs_at_the_configured_rate() -> None:
    env, rng = FrozenLake(FrozenLakeOptions()), random.Random(0)
    env.reset(3)
    best, drawn = env.best_action(), Counter(env.expert(rng, 0.6) for _ in range(2000))
    assert drawn[f"<answer>{best}</answer>"] / 2000 == pytest.approx(0.4 + 0.6 / 4, abs=0.05) and len(drawn) == 4
    assert {env.expert(rng, 0.0) for _ in range(10)} == {f"<answer>{best}</answer>"}


def test_an_impossible_room_is_refused_with_the_reason() -> None:
    env = Sokoban(SokobanOptions(size=5, num_boxes=1, floor=0.6))
    env.options = SokobanOptions.model_construct(**SokobanOptions().model_dump() | {"num_boxes": 15})
    with pytest.raises(ValueError, match="use more floor"):
        env.reset(0)


@pytest.mark.parametrize(
    ("response", "action"),
    [
        ("I go <answer>Up</answer>.", "Up"),
        ("<answer>Up</answer> no, <answer> down </answer>", "Down"),
        ("<think>maybe <answer>Up</answer></think><answer>Left</answer>", "Left"),
        ("<think>maybe <answer>Up</answer></think>Left", None),
        ("<think>maybe <answer>Up</answer>", None),
        ("maybe <answer>Up</answer></think>\n<answer>Right</answer>", "Right"),
        ("<answer>Up</answer>, in the form <answer>...</answer>", "Up"),
        ("Give one in each answer, as in <answer>...</answer>.", None),
        ("<answer>Up</answer><answer>", "Up"),
        ("<answer>Up<answer>Down</answer>", "Down"),
        ("<answer>Up</answer></answer>", "Up"),
        ("<answer>Up</answer><answer>fly</answer>", None),
    ],
)
def test_the_last_answer_outside_the_reasoning_counts(response: str, action: str | None) -> None:
    assert FrozenLake(FrozenLakeOptions())._chosen(response) == action


def test_many_tags_are_parsed_quickly() -> None:
    lake, begin = FrozenLake(FrozenLakeOptions()), time.thread_time()
    for text in ("</answer>", "<answer>", "<answer>...</answer>", "<answer>Up</answer>"):
        lake._chosen(100_000 * text)
    assert time.thread_time() - begin < 2.0
