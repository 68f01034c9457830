"""FrozenLake: find a way over the ice to the goal, with the dynamics of gymnasium's FrozenLake-v1."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hpcrl.envs.games.game import Outcome
from hpcrl.envs.games.grid import MOVES, Cell, GridGame, moved, shortest
from hpcrl.envs.games.tiles import DrawnTile, Figure
from hpcrl.envs.spec import FrozenLakeOptions

SIDEWAYS = {"Up": ("Left", "Right"), "Down": ("Left", "Right"), "Left": ("Up", "Down"), "Right": ("Up", "Down")}
ICE = (214, 236, 250)
YOU, HOLE, GOAL = (
    Figure("disc", (30, 80, 220), 0.25),
    Figure("disc", (20, 20, 30), 0.44),
    Figure("diamond", (40, 170, 70), 0.46),
)
NUM_DRAWS = 100
"""Maximum number of maps to draw; if none is solvable, a way through the last map is frozen."""


class FrozenLake(GridGame[FrozenLakeOptions]):
    """Reward 1 at the goal, 0 otherwise; a hole ends the episode. On slippery ice a step goes in the direction of the
    action or to either side of it, with a third of the probability each. Start, goal and holes follow from the seed,
    and the goal can be reached."""

    symbols = ("you", "ice", "hole", "goal", "you in a hole", "you at the goal")
    tiles = (
        DrawnTile("a blue disc", ICE, (YOU,)),
        DrawnTile("pale blue", ICE),
        DrawnTile("a black disc", ICE, (HOLE,)),
        DrawnTile("a green diamond", ICE, (GOAL,)),
        DrawnTile("a blue disc on a black disc", ICE, (HOLE, YOU)),
        DrawnTile("a blue disc on a green diamond", ICE, (GOAL, YOU)),
    )

    def begin(self, rng: random.Random) -> None:
        self._rng = rng
        places = [(row, column) for row in range(self.options.size) for column in range(self.options.size)]
        for _ in range(NUM_DRAWS):
            self.player, self.goal = rng.sample(places, 2)
            self.holes = {place for place in places if rng.random() >= self.options.frozen}
            self.holes -= {self.player, self.goal}
            if self.way():
                return
        between = (self.player[0], self.goal[1])
        self.holes -= {*_line(self.player, between), *_line(between, self.goal)}

    def things(self) -> list[Cell]:
        return [self.player, self.goal]

    def act(self, action: str) -> Outcome:
        if self.options.slippery:
            action = self._rng.choice((action, *SIDEWAYS[action]))
        before, self.player = self.player, self._after(self.player, action)
        arrived = self.player == self.goal
        ended = arrived or self.player in self.holes
        return Outcome(float(arrived), before != self.player, ended, arrived)

    def best_action(self) -> str:
        way = self.way()
        assert way, "from every place where the episode continues the goal can be reached"
        return way[0]

    def way(self) -> list[str] | None:
        """The shortest way to the goal if no step slips; None if there is none."""
        return shortest(self.player, self._following, lambda place: place == self.goal)

    def _following(self, place: Cell) -> Iterator[tuple[str, Cell]]:
        for action in MOVES:
            if (reached := self._after(place, action)) not in self.holes:
                yield action, reached

    def _after(self, place: Cell, action: str) -> Cell:
        """The place after a step; a step over the edge has no effect."""
        row, column = moved(place, MOVES[action])
        size = self.options.size
        return (row, column) if 0 <= row < size and 0 <= column < size else place

    def symbol(self, place: Cell) -> str:
        you, ice, hole, goal, fallen, arrived = list(self.options.symbols)
        if place == self.player:
            return fallen if place in self.holes else arrived if place == self.goal else you
        return hole if place in self.holes else goal if place == self.goal else ice


def _line(start: Cell, end: Cell) -> list[Cell]:
    """All places from start to end, both included, which are in one row or column."""
    (first_row, last_row), (first, last) = sorted((start[0], end[0])), sorted((start[1], end[1]))
    return [(row, column) for row in range(first_row, last_row + 1) for column in range(first, last + 1)]
