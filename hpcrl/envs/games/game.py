"""Games of one action per turn, named in the model's text, with texts from options."""

from __future__ import annotations

import functools
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from hpcrl.data.messages import WRITTEN_MARK, Messages
from hpcrl.envs.environment import Observation, image_bytes
from hpcrl.envs.spec import GameOptions
from hpcrl.rewards.grading.extract import after_thinking

Options = TypeVar("Options", bound=GameOptions)
EXAMPLE = "..."
"""Placeholder for an action in the field {answer}; not an action, so a model that quotes its prompt does not act."""


@dataclass(frozen=True)
class Outcome:
    """A valid action's result. `effective`: whether it changed anything; `truncated`: whether the game was cut off."""

    reward: float
    effective: bool = True
    ended: bool = False
    success: bool = False
    truncated: bool = False


class NotAnAction(Exception):
    """The named action is invalid, and has changed nothing."""


class Game(ABC, Generic[Options]):
    """A game as an Env (hpcrl.envs.environment). The episode is a function of the seed and the actions only.

    The action is the text in the last <tag> and </tag> of the response, after its thinking. An unknown action changes
    nothing and gets options.invalid_reward. Metrics, all of the episode so far: success, and the shares of valid and of
    effective actions (action_is_valid, action_is_effective).
    """

    actions: Sequence[str]
    """The names of all actions."""
    symbols: ClassVar[tuple[str, ...]] = ()
    """The meaning of each character of options.symbols, for the field {symbols}."""
    task = ""
    """The episode's task, for the field {task} of games that have it."""
    max_turns: int | None = None
    """Maximum turns of an episode, for the field {turns_left}; make_env() sets it. None: unknown."""

    def __init__(self, options: Options, messages: Messages | None = None):
        """`messages` are the row's. The first prompt replaces the last one; a first prompt with an image is a list of
        messages, which contains the others."""
        self.options = options
        self._before = (messages or [])[:-1]
        self._running = False

    @functools.cached_property
    def _by_name(self) -> dict[str, str]:
        return {action.lower(): action for action in self.actions}

    @property
    def described_actions(self) -> str:
        """The actions in words, for the field {actions}."""
        return ", ".join(self.actions)

    @property
    def shows_image(self) -> bool:
        """Whether the field {observation} is an image, from picture(), instead of the text from show()."""
        return False

    @property
    def described_symbols(self) -> str:
        """The symbols with their meanings, for the field {symbols}."""
        said = zip(getattr(self.options, "symbols", ""), self.symbols, strict=True)
        return ", ".join(f"{symbol} {meaning}" for symbol, meaning in said)

    @abstractmethod
    def start(self, seed: int) -> None:
        """Begin the episode of this seed."""

    @abstractmethod
    def show(self) -> str:
        """The state as text, never empty."""

    def picture(self) -> np.ndarray:
        """The state as an image, uint8 [height, width, 3], for games that set shows_image."""
        raise NotImplementedError

    @abstractmethod
    def act(self, action: str) -> Outcome:
        """Execute one of `actions`. NotAnAction if it turns out to be invalid only when executed."""

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """The first prompt of the episode of this seed."""
        self.start(seed)
        self._running, self._turns, self._valid, self._effective = True, 0, 0, 0
        first = self._filled(self.options.prompt)
        return first if isinstance(first, str) else [*self._before, *first], {}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Execute the action that a response names. RuntimeError before reset() and after the end."""
        if not self._running:
            raise RuntimeError("step() needs a running episode: call reset() first")
        chosen = self._chosen(action)
        outcome = Outcome(self.options.invalid_reward, effective=False)
        if chosen is not None:
            try:
                outcome = self.act(chosen)
            except NotAnAction:
                chosen = None
        self._running = not (outcome.ended or outcome.truncated)
        self._turns += 1
        self._valid += chosen is not None
        self._effective += outcome.effective
        metrics = {
            "success": float(outcome.success),
            "action_is_valid": self._valid / self._turns,
            "action_is_effective": self._effective / self._turns,
        }
        observation = self._filled(self.options.invalid if chosen is None else self.options.turn)
        return observation, outcome.reward, outcome.ended, outcome.truncated, {"metrics": metrics}

    def _chosen(self, response: str) -> str | None:
        """The action of a response as `actions` spells it; None if it names none."""
        given = self._given(response)
        return None if given is None else self._by_name.get(given.lower())

    def _given(self, response: str) -> str | None:
        """The content of a response's last tag after its thinking; None for the prompt's example, and without a tag."""
        said, tag = after_thinking(response), self.options.tag
        if not tag:
            return said.strip()
        start = said.rfind(f"</{tag}>")
        while (start := said.rfind(f"<{tag}>", 0, max(0, start))) >= 0:
            given = said[start + len(tag) + 2 : said.index(f"</{tag}>", start)].strip()
            if given != EXAMPLE:
                return given
        return None

    def _written(self, action: str) -> str:
        """The response that gives this action."""
        return f"<{self.options.tag}>{action}</{self.options.tag}>" if self.options.tag else action

    def _filled(self, template: str) -> Observation:
        """The template with its fields filled in; with an image, as a message."""
        text = self._fill(template)
        if not self.shows_image:
            return text
        image = image_bytes(self.picture())
        return [{"role": "user", "content": text, "images": [image] * template.count("{observation}")}]

    def _fill(self, template: str) -> str:
        """The template with its fields filled in, in one pass, so braces in a state are kept."""
        fields = self._fields()
        return re.sub(r"\{(\w+)\}", lambda field: fields[field[1]], template)

    def _fields(self) -> dict[str, str]:
        """The current values of options.fields."""
        return {
            "observation": WRITTEN_MARK if self.shows_image else self.show(),
            "actions": self.described_actions,
            "answer": self._written(EXAMPLE) if self.options.tag else self.actions[0],
            "symbols": self.described_symbols,
            "task": self.task,
            "turn": str(self._turns + 1),
            "turns_left": "unlimited" if self.max_turns is None else str(max(0, self.max_turns - self._turns)),
        }


class ExpertGame(Game[Options]):
    """A game with an expert, which plays episodes for supervised training."""

    @abstractmethod
    def best_action(self) -> str:
        """The action that the expert would choose now."""

    def expert(self, rng: random.Random, noise: float) -> str:
        """A response of the expert, which chooses a random action with probability `noise`."""
        return self._written(rng.choice(self.actions) if rng.random() < noise else self.best_action())


class TextGame(ExpertGame[Options]):
    """A built-in game, whose rules and expert are in this package."""

    def start(self, seed: int) -> None:
        self.begin(random.Random(seed))

    @abstractmethod
    def begin(self, rng: random.Random) -> None:
        """Draw a new start. The game may keep rng for later random events."""


class OpenGame(Game[Options]):
    """A game whose `actions` depend on its state, so they change with every step."""

    def _chosen(self, response: str) -> str | None:
        given = self._given(response)
        return None if given is None else {action.lower(): action for action in self.actions}.get(given.lower())
