"""Environments of gymnasium (Towers et al., arXiv 2407.17032) whose action space is Discrete or Text."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator
from gymnasium.spaces import Discrete, Text

from hpcrl.data.messages import Messages
from hpcrl.envs.games.game import Game, Outcome
from hpcrl.envs.spec import GymnasiumOptions

STYLED = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0?m", re.DOTALL)
"""A text with a terminal style, and the style's codes."""
ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
BOLD = "1"
RenderMode = Literal["ansi", "rgb_array"]
RENDER_MODES: dict[str, RenderMode] = {"ansi": "ansi", "auto": "ansi", "image": "rgb_array"}
"""options.observation -> the mode it needs, or prefers."""


class Gymnasium(Game[GymnasiumOptions]):
    """An action that a response names is one step of the environment, which gives the reward; a response without an
    action makes no step. An action is effective if it changes the observation or ends the episode."""

    def __init__(self, options: GymnasiumOptions, messages: Messages | None = None):
        """ValueError begins with the name of the wrong option."""
        self._env, self._renders = _make(options)
        space = self._env.action_space
        if isinstance(space, Text) and options.actions:
            raise ValueError(f"actions: the actions of {space} are texts and have no other names")
        self._texts = space if isinstance(space, Text) else None
        self._actions = {"...": "..."} if isinstance(space, Text) else _named(space, options)
        self.actions = tuple(self._actions)
        super().__init__(options, messages)

    @property
    def shows_image(self) -> bool:
        return self._renders == "rgb_array"

    @property
    def described_actions(self) -> str:
        if self._texts is not None:
            return f"texts of at most {self._texts.max_length} characters"
        if not self.options.actions and len(self.actions) > 2:
            return f"numbers from {self.actions[0]} to {self.actions[-1]}"
        return super().described_actions

    def start(self, seed: int) -> None:
        self._observation, _ = self._env.reset(seed=seed)

    def show(self) -> str:
        """The state as text. TypeError if the environment renders anything else."""
        if self._renders != "ansi":
            return str(_plain(self._observation))
        drawn = self._env.render()
        if not isinstance(drawn, str):
            raise TypeError(f"render() returned {type(drawn).__name__} with render_mode=ansi, not text")
        return ESCAPE.sub("", STYLED.sub(self._marked, drawn)).strip("\n")

    def picture(self) -> np.ndarray:
        """The rendering. TypeError if the environment renders anything else."""
        drawn = self._env.render()
        if not isinstance(drawn, np.ndarray):
            raise TypeError(f"render() returned {type(drawn).__name__} with render_mode=rgb_array, not an array")
        return drawn

    def act(self, action: str) -> Outcome:
        before = str(_plain(self._observation))
        does = action if self._texts is not None else self._actions[action]
        self._observation, reward, terminated, truncated, info = self._env.step(does)
        return Outcome(
            float(reward),
            effective=bool(terminated or truncated) or str(_plain(self._observation)) != before,
            ended=bool(terminated),
            success=self._succeeded(float(reward), bool(terminated), bool(truncated), info),
            truncated=bool(truncated),
        )

    def close(self) -> None:
        self._env.close()

    def _chosen(self, response: str) -> str | None:
        if self._texts is None:
            return super()._chosen(response)
        given = self._given(response)
        return given if given is not None and self._texts.contains(given) else None

    def _succeeded(self, reward: float, terminated: bool, truncated: bool, info: Mapping[str, Any]) -> bool:
        """Whether the episode succeeded. KeyError if options.success names a value that info lacks at the end."""
        rule = self.options.success
        if rule in ("reward", "terminated"):
            return terminated and (rule == "terminated" or reward > 0)
        key = rule.removeprefix("info.")
        if (terminated or truncated) and key not in info:
            raise KeyError(f"options.success: info has no {key!r} at the end (it has: {', '.join(map(str, info))})")
        return bool(info.get(key, False))

    def _marked(self, styled: re.Match[str]) -> str:
        """The text, with its style shown by characters: `highlight` or [background], *bold*, (other)."""
        codes, text = styled[1].split(";"), styled[2]
        if any(re.fullmatch(r"(4|10)[0-7]", code) for code in codes):
            return self.options.highlight or f"[{text}]"
        return f"*{text}*" if BOLD in codes else f"({text})"


def probe(options: GymnasiumOptions, own_code: bool) -> None:
    """Create the environment once, to test its options, and render one image if images are shown. Without own_code
    nothing is done for an entry_point or an id with a module. ValueError with the message of gymnasium or of the
    environment."""
    if not own_code and (not options.id or ":" in options.id):
        return
    env = Gymnasium(options)
    try:
        if env.shows_image:
            env.reset(0)
    except Exception as error:  # such as a missing pygame
        raise ValueError(f"observation: no image can be rendered: {_said(error)}") from error
    finally:
        env.close()


def _make(options: GymnasiumOptions) -> tuple[gymnasium.Env[Any, Any], RenderMode | None]:
    """The environment, and the mode of the rendering that is shown."""
    at = "id" if options.id else "entry_point"
    module, _, name = options.id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        entry = gymnasium.spec(name).entry_point if options.id else options.entry_point
        creator: Callable[..., Any] = load_env_creator(entry) if isinstance(entry, str) else entry
    except Exception as error:  # a user's module may raise any exception
        raise ValueError(f"{at}: {getattr(options, at)!r} cannot be loaded: {_said(error)}") from error
    asked = RENDER_MODES.get(options.observation)
    can_render = asked in getattr(creator, "metadata", {}).get("render_modes", ())
    if options.observation in ("ansi", "image") and not can_render:
        raise ValueError(f"observation: {getattr(options, at)} has no render_mode {asked}; set observation=value")
    renders = asked if can_render else None
    kwargs = options.kwargs | ({"render_mode": renders} if renders else {})
    try:
        # gymnasium's checker only warns about errors that the environment role checks itself.
        made = gymnasium.make(name, disable_env_checker=True, **kwargs) if options.id else creator(**kwargs)
    except Exception as error:
        raise ValueError(f"kwargs: {getattr(options, at)} cannot be made with {kwargs}: {_said(error)}") from error
    return made, renders


def _named(space: gymnasium.Space[Any], options: GymnasiumOptions) -> dict[str, int]:
    """Name -> action of a Discrete space."""
    if not isinstance(space, Discrete):
        raise ValueError(f"{'id' if options.id else 'entry_point'}: the action space {space} is not Discrete or Text")
    first, count = int(space.start), int(space.n)
    if not options.actions:
        return {str(action): action for action in range(first, first + count)}
    if isinstance(options.actions, list):
        if len(options.actions) != count:
            raise ValueError(f"actions: {len(options.actions)} names for the {count} actions of {space}")
        return dict(zip(options.actions, range(first, first + count), strict=True))
    if wrong := [name for name, action in options.actions.items() if not first <= action < first + count]:
        raise ValueError(f"actions: {wrong[0]} is {options.actions[wrong[0]]}, which {space} does not have")
    return options.actions


def _plain(value: Any) -> Any:
    """An observation as plain Python types, for its text."""
    if hasattr(value, "tolist"):  # numpy
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (tuple, list) else value


def _said(error: Exception) -> str:
    return ESCAPE.sub("", f"{type(error).__name__}: {error}")
