"""The environment protocol: the gymnasium interface over text. Imports neither torch.distributed nor engines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

Observation = str | list[dict[str, Any]]
"""Text, which becomes a user message, or messages in chat form: {"role": "tool", "content": "..."}. A message may refer
to images: {"role": "user", "content": "...", "images": ["file.png"]}."""


class Env(Protocol):
    """One episode. `info["metrics"]` (name -> float) is logged under env/<domain>/. The texts `info["prefix"]` and
    `info["suffix"]` are shown before and after the observation, as in GEM. Other keys of info are ignored.

    The constructor gets env.<domain>.options, and the columns of the prompt's row (answer, prompt, messages and data
    columns) that its parameters name; with **columns it gets all columns. An environment that holds a resource (a
    process, a file) also has close(), called once after its last step, even if the episode has not ended.

    A class may set `runs_in` (env.<domain>.runs_in) to "thread", "process", or "task" if its methods are coroutines. If
    it sets `max_turns = None`, its objects get env.<domain>.max_turns as this attribute. If `special_tokens` is true,
    actions keep their special tokens, without the last token.
    """

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Start an episode, which is a function of row and seed only; returns (first observation, info).

        The observation is the first prompt: a text replaces the last message of the row's prompt, a list of messages
        replaces all messages, and an empty text keeps the row's prompt. `info["tools"]` are tools in OpenAI form that
        the chat template shows the model, in addition to the row's tools. If `info["terminated"]` or
        `info["truncated"]` is true, the episode ends before its first turn.
        """

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """(observation, reward of this turn, terminated, truncated, info)."""


KEPT = ("metrics", "tools", "terminated", "truncated")
"""Keys of info that are read."""
UNREAD_KEYS = "hpcrl_unread"
"""Key of info that lists the ignored keys."""


def begin(env: Any, seed: int) -> Any:
    """Call reset(), which may accept the seed only as a keyword argument (gymnasium)."""
    return env.reset(seed=seed) if _names_seed(env.reset) else env.reset(seed)


def reset_problem(made: type) -> str:
    """Why reset() of a class cannot be called with a seed; empty if it can, or if its parameters are unknown."""
    function = inspect.getattr_static(made, "reset")
    if not callable(made.reset):  # type: ignore[attr-defined]
        return "reset is not a method"
    own = () if isinstance(function, staticmethod | classmethod) else (None,)
    try:
        signature = inspect.signature(made.reset)  # type: ignore[attr-defined]
        signature.bind(*own, seed=0) if _names_seed(made.reset) else signature.bind(*own, 0)  # type: ignore[attr-defined]
    except TypeError as error:
        return f"reset() must take a seed, as in reset(self, seed): {error}"
    except ValueError:  # a C function has no signature
        return ""
    return ""


def _names_seed(reset: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(reset).parameters.get("seed")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind is not parameter.POSITIONAL_ONLY


def checked_reset(returned: Any) -> tuple[Observation, dict[str, Any]]:
    """reset()'s result: (observation with prefix and suffix, known keys of info). TypeError if it has another form."""
    observation, info = _values(returned, "reset()", "observation", "info")
    return _whole(observation, info), _kept(info)


def checked_step(returned: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
    """step()'s result, with observation and info as in checked_reset(). TypeError if it has another form."""
    values = _values(returned, "step()", "observation", "reward", "terminated", "truncated", "info")
    observation, reward, terminated, truncated, info = values
    return _whole(observation, info), reward, terminated, truncated, _kept(info)


def _whole(observation: Observation, info: Mapping[str, Any]) -> Observation:
    """The observation with the texts prefix and suffix of info around it."""
    prefix, suffix = (text if isinstance(text := info.get(key), str) else "" for key in ("prefix", "suffix"))
    if isinstance(observation, str):
        return _after(prefix + observation, suffix)
    if not (prefix or suffix) or not isinstance(observation, list):
        return observation
    messages = [dict(message) for message in observation] or [{"role": "user", "content": ""}]
    messages[0]["content"] = f"{prefix}{messages[0]['content']}"
    messages[-1]["content"] = _after(messages[-1]["content"], suffix)
    return messages


def _after(text: str, suffix: str) -> str:
    """The text with a suffix, which begins on a new line."""
    return f"{text}\n{suffix}" if text and suffix and not text.endswith("\n") else f"{text}{suffix}"


def _kept(info: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: info[key] for key in KEPT if key in info}
    known = (*KEPT, "prefix", "suffix", UNREAD_KEYS)
    unread = [*map(str, info.get(UNREAD_KEYS, ())), *sorted(str(key) for key in info if key not in known)]
    return kept | ({UNREAD_KEYS: unread[:20]} if unread else {})


def _values(returned: Any, call: str, *names: str) -> list[Any]:
    """The values that a call returned, one for each name. The last, a mapping, may be None."""
    if not isinstance(returned, (tuple, list)) or len(returned) != len(names):
        got = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else type(returned).__name__
        raise TypeError(f"{call} must return ({', '.join(names)}), but returned {got}")
    *values, info = returned
    if info is not None and not isinstance(info, Mapping):
        raise TypeError(f"{call} must return a mapping as info, but returned {type(info).__name__}")
    return [*values, info or {}]


def shortened(text: str, most_chars: int) -> str:
    """The text; a longer text is cut to its beginning and end, most_chars in total, around a line with the number of
    characters left out."""
    if len(text) <= most_chars:
        return text
    half = most_chars // 2
    return f"{text[:half]}\n[{len(text) - most_chars} characters left out]\n{text[len(text) - most_chars + half :]}"


def num_chars(observation: Observation) -> int:
    """Number of characters of an observation: the texts of all messages, plus one for each message."""
    if isinstance(observation, str):
        return len(observation)
    return sum(1 + sum(len(text) for text in message.values() if isinstance(text, str)) for message in observation)


def cut(observation: Observation, most_chars: int) -> Observation:
    """The observation with its longest message cut to most_chars by shortened()."""
    if isinstance(observation, str):
        return shortened(observation, most_chars)
    if not observation:
        return observation
    place = max(range(len(observation)), key=lambda number: len(observation[number]["content"]))
    longest = {**observation[place], "content": shortened(observation[place]["content"], most_chars)}
    return [*observation[:place], longest, *observation[place + 1 :]]
