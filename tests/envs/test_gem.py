"""Third-party environments of GEM, by the name for its `make`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hpcrl.config import EnvConfig
from hpcrl.envs.environment import begin, checked_reset, checked_step
from hpcrl.envs.factory import check_env, make_env
from tests.contracts.test_env import ROW

pytestmark = pytest.mark.outside

GAMES = {
    "FifteenPuzzle-v0-easy": ("__", ("up", "down", "left", "right")),
    "Sudoku-v0-easy": ("R1 ", [f"{row} {column} {n}" for row in "1234" for column in "1234" for n in "1234"]),
    "Minesweeper-v0-easy": (" .  . ", ("reveal 2 2",)),
    "TowerofHanoi-v0-easy": ("A: [3, 2, 1]", ("A C",)),
    "Game2048-v0-easy": ("   2", ("up", "down", "left", "right")),
    "Crosswords-v0-easy": ("_", ()),
    "Sokoban-v0-easy": ("# # #", ("up", "down", "left", "right")),
}
"""Game -> what its board has, and moves of which one changes it. Of the others, those that need nltk have boards."""


def game(name: str) -> Any:
    """(configuration, environment)."""
    pytest.importorskip("gem", reason="GEM is not installed; make test-outside")
    config = EnvConfig(name="class", class_path="gem:make", options={"env_id": f"game:{name}"})
    check_env(config, "default")
    return make_env(config, ROW)


def test_gem_guess_the_number_can_be_won_by_its_hints() -> None:
    def played(seed: int) -> list[Any]:
        env, low, high = game("GuessTheNumber-v0-easy"), 1, 10
        shown = [checked_reset(begin(env, seed))[0]]
        while low <= high:
            guess = (low + high) // 2
            text, reward, ended, truncated, _ = checked_step(env.step(f"I say \\boxed{{{guess}}}."))
            shown.append(text)
            if ended:
                assert reward == 1.0 and not truncated and f"the correct number {guess}" in str(text)
                return shown
            assert reward == 0.0
            low, high = (low, guess - 1) if "lower" in str(text) else (guess + 1, high)
        pytest.fail("it is none of the numbers")

    games = [played(seed) for seed in range(12)]
    assert "between 1 and 10" in games[0][0] and [played(seed) for seed in range(12)] == games
    assert len({game[-1] for game in games}) > 3


@pytest.mark.parametrize(("name", "board", "moves"), [(name, *about) for name, about in GAMES.items()])
def test_gem_boards_are_shown_to_the_player(name: str, board: str, moves: Sequence[str]) -> None:
    if name.startswith("Crosswords"):
        pytest.importorskip("pandas", reason="GEM's Crosswords need pandas")
    first, _ = checked_reset(begin(game(name), 3))
    assert board in str(first).split("\n", 1)[1] and first == checked_reset(begin(game(name), 3))[0]
    shown = set()
    for move in moves:
        env = game(name)
        begin(env, 3)
        text, _, ended, _, _ = checked_step(env.step(f"\\boxed{{{move}}}"))
        if not ended:
            shown.add(_board(text))
    assert not moves or shown - {_board(first)}, "no move is to be seen"


def _board(text: Any) -> str:
    """The lines after the one that announces the board."""
    return str(text)[str(text).rindex(":") :]
