"""Tic-tac-toe against an opponent that plays at random or without mistakes."""

from __future__ import annotations

import functools
import random

from hpcrl.envs.games.game import Outcome, TextGame
from hpcrl.envs.spec import TicTacToeOptions

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
FREE = " "


class TicTacToe(TextGame[TicTacToeOptions]):
    """Reward 1 for a victory, options.draw_reward for a draw, 0 for a defeat. The model is X, the opponent O. To
    name a taken cell is a valid action, but it changes nothing and gets invalid_reward."""

    actions = tuple("123456789")

    def begin(self, rng: random.Random) -> None:
        self._rng = rng
        self.board = FREE * 9
        if not self.options.begins:
            self._answer()

    def show(self) -> str:
        cells = [cell if cell != FREE else str(place + 1) for place, cell in enumerate(self.board)]
        return "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))

    def act(self, action: str) -> Outcome:
        place = int(action) - 1
        if self.board[place] != FREE:
            return Outcome(self.options.invalid_reward, effective=False)
        self.board = _put(self.board, place, "X")
        if not _is_over(self.board):
            self._answer()
        if not _is_over(self.board):
            return Outcome(0.0)
        won, lost = _won(self.board, "X"), _won(self.board, "O")
        reward = 1.0 if won else 0.0 if lost else self.options.draw_reward
        return Outcome(reward, ended=True, success=won)

    def best_action(self) -> str:
        return str(_best(self.board, "X") + 1)

    def _answer(self) -> None:
        perfect = self.options.opponent == "perfect"
        place = _best(self.board, "O") if perfect else self._rng.choice(_free(self.board))
        self.board = _put(self.board, place, "O")


def _free(board: str) -> list[int]:
    return [place for place, cell in enumerate(board) if cell == FREE]


def _put(board: str, place: int, player: str) -> str:
    return board[:place] + player + board[place + 1 :]


def _won(board: str, player: str) -> bool:
    return any(all(board[place] == player for place in line) for line in LINES)


def _is_over(board: str) -> bool:
    return FREE not in board or _won(board, "X") or _won(board, "O")


def _best(board: str, player: str) -> int:
    """The first of the places with the highest value for the player."""
    return max(_free(board), key=lambda place: -_value(_put(board, place, player), _other(player)))


@functools.cache
def _value(board: str, player: str) -> int:
    """1, 0 or -1: the result for the player, who moves next, if nobody errs (negamax over 5478 positions)."""
    if _won(board, _other(player)):
        return -1
    values = [-_value(_put(board, place, player), _other(player)) for place in _free(board)]
    return max(values, default=0)


def _other(player: str) -> str:
    return "O" if player == "X" else "X"
