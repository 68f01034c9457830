"""Games of TextWorld (arXiv 1806.11532), and of ALFWorld (arXiv 2010.03768), which the same library runs."""

from __future__ import annotations

import functools
import importlib.util
import json
import random
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import textworld

from hpcrl.data.env_sources import HALF
from hpcrl.envs.games.game import OpenGame, Outcome
from hpcrl.envs.spec import TextWorldOptions

COMPILED, PLANNED = (".z8", ".ulx"), ".tw-pddl"
TASK = re.compile(r"Your task is to: (.+)")
"""The sentence with the task, at the end of the first text of an ALFWorld game."""
STATUS = re.compile(r"\n>[^\n]*$")
"""The game's input prompt after a text, with its status line."""
# The library that runs compiled games warns about every game that is not a known commercial one.
warnings.filterwarnings("ignore", message="Game .* is not fully supported")
NAME_SIGNS = {"_bar_": "|", "_minus_": "-", "_plus_": "+", "_dot_": ".", "_comma_": ","}


class TextWorld(OpenGame[TextWorldOptions]):
    """An action is one of the game's admissible commands; other texts do not reach the game. An action is effective if
    it changes a fact of the game's world. Success means that the game is won.

    The seed chooses the game, unless the row's column `game` names a file.
    """

    def __init__(self, options: TextWorldOptions, game: str | None = None):
        super().__init__(options)
        self._given_game = game
        self._env: Any = None

    def start(self, seed: int) -> None:
        """ValueError if no game can be solved."""
        self.close()
        self.game = self._given_game or self._drawn(seed)
        asked = ("admissible_commands", "objective", "won", "facts", "max_score")
        self._env = textworld.start(self.game, textworld.EnvInfos(**dict.fromkeys(asked, True)))
        if self.game.endswith(PLANNED):
            _name_things(self._env)
        self._env.seed(seed)
        state = self._env.reset()
        self._most, self._score = state.get("max_score") or 1, 0.0
        self.task = state.get("objective") or ""
        text = state.feedback
        if not self.task and (said := TASK.search(text)):
            self.task = said[1].strip()
        if self.task in text and not self.game.endswith(PLANNED):
            text = text[text.index(self.task) :]  # without the library's banner
        self._see(state, text)

    def show(self) -> str:
        return self._text

    def act(self, action: str) -> Outcome:
        before = self._facts
        state, score, done = self._env.step(action)
        self._see(state, state.feedback)
        won, gained, self._score = bool(state["won"]), float(score) - self._score, float(score)
        reward = gained / self._most if self.options.reward == "score" else float(won)
        return Outcome(reward, self._facts != before, bool(done), won)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _see(self, state: Any, text: str) -> None:
        self._text = re.sub(r"\n{3,}", "\n\n", STATUS.sub("", text)).strip() or "Nothing happens."
        self._facts = frozenset(map(str, state["facts"]))
        self.actions = list(state["admissible_commands"])

    def _drawn(self, seed: int) -> str:
        options = self.options
        files = games(tuple(options.val_games if seed >= HALF and options.val_games else options.games))
        for file in random.Random(seed).sample(files, len(files)):
            # ALFWorld's files record whether a planner has solved the game.
            if not file.endswith(PLANNED) or json.loads(Path(file).read_bytes()).get("solvable", True):
                return file
        raise ValueError(f"options.games: none of the {len(files)} games can be solved")


@functools.cache
def games(places: tuple[str, ...]) -> list[str]:
    """The game files among these files and in these folders, in order. ValueError names a missing or invalid file."""
    found: list[str] = []
    for place in places:
        path = Path(place)
        here = sorted(file for file in path.rglob("*") if _is_game(file)) if path.is_dir() else [path]
        if not here or not here[0].is_file():
            raise ValueError(f"there is no game in {place!r} ({', '.join([*COMPILED, PLANNED])})")
        for file in here:
            if not _is_game(file):
                raise ValueError(f"{str(file)!r} is not a game ({', '.join([*COMPILED, PLANNED])})")
            if file.suffix in COMPILED and not file.with_suffix(".json").is_file():
                raise ValueError(f"{str(file)!r} needs the file {file.stem}.json beside it, which tw-make writes")
        found += map(str, here)
    return found


def probe(options: TextWorldOptions, own_code: bool) -> None:
    """ValueError if a game, or the package that runs it, is missing."""
    for name in ("games", "val_games"):
        try:
            files = games(tuple(getattr(options, name)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if any(file.endswith(PLANNED) for file in files) and importlib.util.find_spec("fast_downward") is None:
            raise ValueError(
                f"{name}: games of ALFWorld need the package fast-downward-textworld (GPL), which is missing"
            )


def _is_game(file: Path) -> bool:
    return file.suffix in COMPILED or file.name.endswith(PLANNED)


def _name_things(env: Any) -> None:
    """Rename an ALFWorld game's objects from their ids to ALFWorld's kind and number, counted down in id order."""
    things = sorted(env._entity_infos.values(), key=lambda thing: str(thing.id))
    kinds = [_kind(thing.id) for thing in things]
    left = Counter(kinds)
    for thing, kind in zip(things, kinds, strict=True):
        if kind is None:
            thing.name = functools.reduce(lambda text, sign: text.replace(*sign), NAME_SIGNS.items(), thing.id)
        else:
            thing.name = f"{kind} {left[kind]}"
            left[kind] -= 1


def _kind(name: str) -> str | None:
    """The kind in an id: mug for mug_bar_1, sinkbasin for sink_bar_1_bar_sinkbasin; None without _bar_."""
    kind, bar, _ = name.partition("_bar_")
    return (kind + "basin" if "basin" in name else kind) if bar else None
