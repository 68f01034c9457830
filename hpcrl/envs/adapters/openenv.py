"""Plays environments on OpenEnv servers (https://github.com/meta-pytorch/OpenEnv).

Each episode has its own WebSocket connection, which is one session on the server.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from openenv.core.env_client import EnvClient
from pydantic import ValidationError

from hpcrl.envs.games.game import Game, NotAnAction, Outcome
from hpcrl.envs.spec import OpenEnvOptions

REFUSED = "(code: VALIDATION_ERROR)"
"""How the client's error ends if the server refuses the form of an action."""
OF_RESULT = ("done", "reward", "metadata")
"""Fields of every observation that are not shown."""


class OpenEnvError(RuntimeError):
    """The episode was lost with its connection, or the observation does not match the options."""


class OpenEnv(Game[OpenEnvOptions]):
    """options.action turns a response's answer into an action. An action whose form the server refuses is invalid; an
    exception of the environment is an error. An action is effective if it changes the text or ends the episode."""

    actions = ("...",)
    described_actions = "texts"

    def __init__(self, options: OpenEnvOptions, reset: Mapping[str, Any] | None = None):
        """reset: arguments of the environment's reset() from the row. ValueError begins with the wrong option."""
        super().__init__(options)
        self._reset = {**options.reset, **(reset or {})}
        self._client_class: Any = _imported("client", options.client)
        if not (isinstance(self._client_class, type) and issubclass(self._client_class, EnvClient)):
            raise ValueError(f"client: {options.client} is not an OpenEnv client (openenv.core.EnvClient)")
        self._action_class: Any = _imported("action_class", options.action_class) if options.action_class else dict
        self._client: Any = None

    def start(self, seed: int) -> None:
        """Begin a new session. Raises the client's ConnectionError or RuntimeError if the server has none."""
        self.close()
        client = self.connected()
        result = client.reset(seed=seed, **self._reset)
        self._socket = client._async._ws
        self._text = self._shown(result.observation)

    def connected(self) -> Any:
        """A new client, with its own connection."""
        seconds = self.options.timeout_s
        made = self._client_class(base_url=self.options.url, connect_timeout_s=seconds, message_timeout_s=seconds)
        self._client = made.sync()
        self._client.connect()
        return self._client

    def show(self) -> str:
        return self._text

    def act(self, action: str) -> Outcome:
        """OpenEnvError if the connection has broken."""
        before = self._text
        try:
            made = self._action_class(**_filled(self.options.action, action))
        except ValidationError as error:
            raise NotAnAction from error
        try:
            result = self._client.step(made)
        except RuntimeError as error:
            self._check_session()
            if str(error).endswith(REFUSED):
                raise NotAnAction from error
            raise
        self._check_session()
        self._text = self._shown(result.observation)
        reward, ended = float(result.reward or 0.0), bool(result.done)
        success = ended and self._succeeded(reward, result.observation)
        return Outcome(reward, effective=ended or self._text != before, ended=ended, success=success)

    def close(self) -> None:
        """End the session, if there is one."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):  # the server is gone
                client.close()

    def _check_session(self) -> None:
        """OpenEnvError if the client has reconnected by itself, to a session in which the episode has not begun."""
        if self._client._async._ws is not self._socket:
            raise OpenEnvError(f"{self.options.url}: the connection broke, which ended the episode")

    def _chosen(self, response: str) -> str | None:
        given = self._given(response) or ""
        return given.encode(errors="replace").decode() or None  # some servers cannot return a lone surrogate

    def _succeeded(self, reward: float, observation: Any) -> bool:
        rule = self.options.success
        if rule in ("reward", "done"):
            return rule == "done" or reward > 0
        return bool(_part(_plain(observation), rule.removeprefix("observation."), "success"))

    def _shown(self, observation: Any) -> str:
        fields = _plain(observation)
        if self.options.observation:
            shown = _part(fields, self.options.observation, "observation")
        else:
            shown = {name: value for name, value in fields.items() if name not in OF_RESULT}
        text = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
        return text or "(nothing)"


def probe(options: OpenEnvOptions, own_code: bool) -> None:
    """ValueError if the classes cannot be imported or the server does not answer; only env ranks check this."""
    if not own_code:
        return
    env = OpenEnv(options)
    try:
        env.connected()
    except Exception as error:  # the client's code may raise any exception
        raise ValueError(f"url: {error}") from error
    finally:
        env.close()


def _imported(option: str, path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise any exception
        raise ValueError(f"{option}: {path!r} cannot be loaded: {type(error).__name__}: {error}") from error


def _filled(template: Any, answer: str) -> Any:
    """The template with {answer} replaced in all its texts."""
    if isinstance(template, str):
        return template.replace("{answer}", answer)
    if isinstance(template, Mapping):
        return {name: _filled(value, answer) for name, value in template.items()}
    return [_filled(value, answer) for value in template] if isinstance(template, list) else template


def _plain(observation: Any) -> dict[str, Any]:
    """The fields of an observation, which an environment's own client returns as an object."""
    return observation if isinstance(observation, dict) else observation.model_dump(mode="json")


def _part(fields: dict[str, Any], path: str, option: str) -> Any:
    """The value at a path: keys of mappings and indices of lists, separated by dots."""
    found: Any = fields
    for name in path.split("."):
        try:
            found = found[int(name)] if isinstance(found, Sequence) and not isinstance(found, str) else found[name]
        except (LookupError, ValueError, TypeError) as error:
            raise OpenEnvError(f"options.{option}: the observation {str(fields)[:500]} has no {path!r}") from error
    return found
