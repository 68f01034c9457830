"""The environment protocol: the gymnasium interface over text. Imports neither torch.distributed nor engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

Observation = str | list[dict[str, Any]]
"""Text, which becomes a user message, or messages in chat form: {"role": "tool", "content": "..."}. A message may refer
to images: {"role": "user", "content": "...", "images": ["file.png"]}."""


class Env(Protocol):
    """One episode. `info["metrics"]` (name -> float) is logged under env/<domain>/.

    The constructor gets env.<domain>.options, and the columns of the prompt's row (answer, prompt, messages and the
    columns of the data) that it names; with **columns it gets all of them. An environment that holds a resource (a
    process, a file) also has close(), called once after its last step, even if the episode has not ended.

    A class may declare `runs_in` (env.<domain>.runs_in): "thread", "task" if its methods are coroutines, "process".
    """

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Start an episode, which is a function of row and seed only; returns (first observation, info).

        The observation is the first prompt: a text replaces the last message of the row's prompt, a list of messages
        replaces all messages, and an empty text keeps the row's prompt. `info["tools"]` are tools in OpenAI form that
        the chat template shows the model, beside those of the row.
        """

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """(observation, reward of this turn, terminated, truncated, info)."""


def checked_reset(returned: Any) -> tuple[Observation, dict[str, Any]]:
    """What reset() returned. TypeError unless it is (observation, info)."""
    observation, info = _values(returned, "reset()", "observation", "info")
    return observation, info


def checked_step(returned: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
    """What step() returned. TypeError unless it is (observation, reward, terminated, truncated, info)."""
    values = _values(returned, "step()", "observation", "reward", "terminated", "truncated", "info")
    observation, reward, terminated, truncated, info = values
    return observation, reward, terminated, truncated, info


def _values(returned: Any, call: str, *names: str) -> list[Any]:
    """The values of these names that a call returned. The last, a mapping, may be None."""
    if not isinstance(returned, (tuple, list)) or len(returned) != len(names):
        got = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else type(returned).__name__
        raise TypeError(f"{call} must return ({', '.join(names)}), and returned {got}")
    *values, info = returned
    if info is not None and not isinstance(info, Mapping):
        raise TypeError(f"{call} must return a mapping as info, and returned {type(info).__name__}")
    return [*values, info or {}]


def shortened(text: str, most_chars: int) -> str:
    """The text; of a longer one the beginning and the end, together most_chars, around a line that says what is left
    out."""
    if len(text) <= most_chars:
        return text
    half = most_chars // 2
    return f"{text[:half]}\n[{len(text) - most_chars} characters left out]\n{text[len(text) - most_chars + half :]}"


def num_chars(observation: Observation) -> int:
    """Characters of an observation: of all texts of its messages, and one for each message."""
    if isinstance(observation, str):
        return len(observation)
    return sum(1 + sum(len(text) for text in message.values() if isinstance(text, str)) for message in observation)


def cut(observation: Observation, most_chars: int) -> Observation:
    """The observation with most_chars of its longest message, as shortened() leaves them."""
    if isinstance(observation, str):
        return shortened(observation, most_chars)
    if not observation:
        return observation
    place = max(range(len(observation)), key=lambda number: len(observation[number]["content"]))
    longest = {**observation[place], "content": shortened(observation[place]["content"], most_chars)}
    return [*observation[:place], longest, *observation[place + 1 :]]
