"""Sokoban: push every box onto a target. Rewards as in gym-sokoban (Racanière et al., arXiv 1707.06203, appendix)."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hpcrl.envs.games.game import Outcome
from hpcrl.envs.games.grid import MOVES, Cell, GridGame, moved, shortest
from hpcrl.envs.games.tiles import DrawnTile, Figure
from hpcrl.envs.spec import SokobanOptions

STEP, ON_TARGET, SOLVED = -0.1, 1.0, 10.0
NUM_DRAWS = 1000
WALL, FLOOR = (70, 70, 80), (245, 240, 225)
YOU, TARGET, BOX, PLACED = (
    Figure("disc", (30, 80, 220), 0.25),
    Figure("diamond", (215, 40, 40), 0.48),
    Figure("square", (240, 150, 30), 0.3),
    Figure("square", (40, 170, 70), 0.3),
)

Position = tuple[Cell, frozenset[Cell]]
"""(player, boxes)."""


class Sokoban(GridGame[SokobanOptions]):
    """Rewards of an action: -0.1, and 1 for each box pushed onto a target, -1 for each pushed off one, 10 at the end,
    when all boxes are on targets. Room and boxes follow from the seed.

    Every room is solvable by construction: the start is reached from the solved room by steps backwards in which the
    player may pull a box; pushing in the other direction is the solution.
    """

    symbols = ("wall", "floor", "target", "box on a target", "box", "you", "you on a target")
    tiles = (
        DrawnTile("dark grey", WALL),
        DrawnTile("beige", FLOOR),
        DrawnTile("a red diamond", FLOOR, (TARGET,)),
        DrawnTile("a green square on a red diamond", FLOOR, (TARGET, PLACED)),
        DrawnTile("an orange square", FLOOR, (BOX,)),
        DrawnTile("a blue disc", FLOOR, (YOU,)),
        DrawnTile("a blue disc on a red diamond", FLOOR, (TARGET, YOU)),
    )

    def begin(self, rng: random.Random) -> None:
        """ValueError if no room fits the options, which test_games.py excludes for small and large rooms."""
        for _ in range(NUM_DRAWS):
            self.floor = _room(rng, self.options.size, self.options.floor)
            if len(self.floor) <= self.options.num_boxes:
                continue
            places = rng.sample(sorted(self.floor), self.options.num_boxes + 1)
            self.player, self.targets = places[0], frozenset(places[1:])
            self.boxes = self.targets
            for _ in range(self.options.steps_back):
                self._step_back(rng)
            if not self.boxes & self.targets:
                return
        raise ValueError(f"no room of these options in {NUM_DRAWS} draws; use more floor or steps_back, or fewer boxes")

    def things(self) -> list[Cell]:
        return [self.player, *sorted(self.boxes), *sorted(self.targets)]

    def act(self, action: str) -> Outcome:
        before, placed = (self.player, self.boxes), len(self.boxes & self.targets)
        self.player, self.boxes = self._after(before, action)
        now = len(self.boxes & self.targets)
        solved = now == len(self.boxes)
        reward = STEP + ON_TARGET * (now - placed) + SOLVED * solved
        return Outcome(reward, before != (self.player, self.boxes), solved, solved)

    def best_action(self) -> str:
        """A shortest solution's first step; any action if a box is stuck. Above two boxes it may take seconds."""
        way = self.solution()
        return way[0] if way else self.actions[0]

    def solution(self) -> list[str] | None:
        """A shortest solution from the current state; None if there is none."""
        return shortest((self.player, self.boxes), self._following, lambda state: state[1] == self.targets)

    def _following(self, state: Position) -> Iterator[tuple[str, Position]]:
        return ((action, self._after(state, action)) for action in MOVES)

    def _after(self, state: Position, action: str) -> Position:
        """The state after a step; unchanged if a wall, or a box that cannot be pushed, is in the way."""
        player, boxes = state
        to, beyond = moved(player, MOVES[action]), moved(player, MOVES[action], 2)
        if to not in self.floor or (to in boxes and (beyond not in self.floor or beyond in boxes)):
            return state
        return to, (boxes - {to} | {beyond} if to in boxes else boxes)

    def _step_back(self, rng: random.Random) -> None:
        """A random step, which at random also pulls a box that is behind the player."""
        move = MOVES[rng.choice(self.actions)]
        to, behind = moved(self.player, move), moved(self.player, move, -1)
        if to not in self.floor or to in self.boxes:
            return
        if behind in self.boxes and rng.random() < 0.8:
            self.boxes = self.boxes - {behind} | {self.player}
        self.player = to

    def symbol(self, place: Cell) -> str:
        wall, floor, target, placed, box, you, you_on_target = list(self.options.symbols)
        if place not in self.floor:
            return wall
        if place == self.player:
            return you_on_target if place in self.targets else you
        if place in self.boxes:
            return placed if place in self.targets else box
        return target if place in self.targets else floor


def _room(rng: random.Random, size: int, share: float) -> set[Cell]:
    """The floor of a room: connected, and about `share` of the places within the outer walls."""
    inside = range(1, size - 1)
    place = (rng.choice(inside), rng.choice(inside))
    floor = {place}
    while len(floor) < round(share * len(inside) ** 2):
        to = moved(place, rng.choice([*MOVES.values()]))
        if to[0] in inside and to[1] in inside:
            place = to
            floor.add(place)
    return floor
