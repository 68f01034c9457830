"""Games on a grid: places and paths."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import ClassVar, TypeVar

import numpy as np

from hpcrl.envs.games.game import TextGame
from hpcrl.envs.games.tiles import DrawnTile, draw
from hpcrl.envs.spec import GridOptions

Cell = tuple[int, int]
"""(row, column), from the upper left corner."""
MOVES: dict[str, Cell] = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}

State = TypeVar("State", bound=Hashable)
Options = TypeVar("Options", bound=GridOptions)


class GridGame(TextGame[Options]):
    """A game that shows a square grid with one character, or one tile of an image, per place."""

    actions = tuple(MOVES)
    tiles: ClassVar[tuple[DrawnTile, ...]]
    """The tile of each of `symbols`."""

    @property
    def shows_image(self) -> bool:
        return self.options.show == "image"

    @property
    def described_symbols(self) -> str:
        if not self.shows_image:
            return super().described_symbols
        return ", ".join(f"{tile.look} for {meaning}" for tile, meaning in zip(self.tiles, self.symbols, strict=True))

    @abstractmethod
    def symbol(self, place: Cell) -> str:
        """The character of a place."""

    @abstractmethod
    def things(self) -> Sequence[Cell]:
        """The places that the field {places} names, in a fixed order."""

    def show(self) -> str:
        rows = range(self.options.size)
        return "\n".join("".join(self.symbol((row, column)) for column in rows) for row in rows)

    def picture(self) -> np.ndarray:
        tiles = dict(zip(self.options.symbols, self.tiles, strict=True))
        rows = self.show().split("\n")
        return draw([[tiles[symbol] for symbol in row] for row in rows], self.options.tile_pixels)

    def _fields(self) -> dict[str, str]:
        places = " ".join(f"{self.symbol(place)}{place[0]},{place[1]}" for place in self.things())
        return super()._fields() | {"places": places}


def moved(place: Cell, move: Cell, steps: int = 1) -> Cell:
    """The place after this many steps in one direction."""
    return place[0] + steps * move[0], place[1] + steps * move[1]


def shortest(
    start: State, following: Callable[[State], Iterable[tuple[str, State]]], arrived: Callable[[State], bool]
) -> list[str] | None:
    """The shortest sequence of actions from `start` to a state for which `arrived` is true, by breadth-first search.
    None if there is none. `following` yields a state's actions, each with the state to which it leads."""
    before: dict[State, tuple[str, State] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        if arrived(state):
            return _way(before, state)
        for action, reached in following(state):
            if reached not in before:
                before[reached] = action, state
                waiting.append(reached)
    return None


def _way(before: Mapping[State, tuple[str, State] | None], state: State) -> list[str]:
    way = []
    while (step := before[state]) is not None:
        way.append(step[0])
        state = step[1]
    return way[::-1]
