"""Build the prompts of episodes: the first prompt, and each turn's prompt if turns are separate sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcrl.data.chat import encode, render
from hpcrl.data.messages import Messages
from hpcrl.envs.environment import Observation, cut, num_chars


def as_messages(observation: Any) -> Messages:
    """An observation as chat messages. TypeError if it is neither text nor messages."""
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    if not isinstance(observation, list):
        raise TypeError(f"the observation is not text but {type(observation).__name__}")
    for message in observation:
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise TypeError("a message of the observation has no role or content that is text")
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:
            raise TypeError(f"the observation is no valid Unicode: {error}") from None
        if not all(isinstance(image, str) for image in message.get("images") or []):
            raise TypeError("images of an observation are given by reference, as text")
    return observation


def with_tools(known: list[dict[str, Any]] | None, added: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add an environment's tools to a row's tools, all in OpenAI form. The environment's tools replace known tools of
    the same name. TypeError for an invalid tool."""
    try:
        names = {tool["function"]["name"] for tool in added}
    except (KeyError, TypeError) as error:
        raise TypeError("info['tools'] must be a list of tools: {'type': 'function', 'function': {...}}") from error
    return [*(tool for tool in known or [] if tool.get("function", {}).get("name") not in names), *added]


def first_prompt(
    tokenizer: Any, row: dict[str, Any], observation: Any, added: bool = False, examples: Messages | None = None
) -> tuple[Messages, np.ndarray]:
    """(messages, int32 token ids) of an episode's first prompt. With an empty observation there are no tokens, and the
    row's own prompt is used, unless the environment has added tools to the row (`added`) or there are examples. `row`
    is {messages, tools, ...}; examples are inserted after the system messages. TypeError as in as_messages()."""
    said, tools = as_messages(observation), row["tools"]
    if not (observation or added or examples):
        return row["messages"], np.empty(0, dtype=np.int32)
    if isinstance(observation, str):
        messages = [*row["messages"][:-1], *said] if observation else list(row["messages"])
    else:
        messages = said or list(row["messages"])
    if examples:
        begins = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
        messages = [*messages[:begins], *examples, *messages[begins:]]
    return messages, prompt_ids(tokenizer, messages, tools)


def fitting(
    observation: Observation, room: int, tokens: Callable[[Observation], tuple[Messages, np.ndarray]]
) -> tuple[Messages, np.ndarray]:
    """Cut text from the middle of the observation's longest message until tokens(observation) has at most `room`
    tokens, and return its result. If even an empty message is too long, return the result for the empty message."""
    fits, too_many = 0, num_chars(observation)
    while too_many - fits > 1:
        count = (fits + too_many) // 2
        if len(tokens(cut(observation, count))[1]) > room:
            too_many = count
        else:
            fits = count
    return tokens(cut(observation, fits))


def window(shown: Sequence[Messages], said: Sequence[str], history: int) -> Messages:
    """A turn's prompt if turns are separate sequences: the first prompt, the latest `history` turns (observation and
    the model's turn), and the current observation. A tool's result always follows the turn that called the tool.

    `shown` has the first prompt and all observations since, `said` the model's turns between them. Where turns are left
    out, adjacent messages of the same role are joined, because some chat templates refuse two in a row.
    """
    first = max(0, len(said) - history)
    messages = list(shown[0])
    for number, observation in enumerate(shown[1:], 1):
        answers = bool(observation) and observation[0]["role"] == "tool"
        if number > first or (number == first and answers):
            messages.append({"role": "assistant", "content": said[number - 1]})
        elif number < first or not observation:
            continue
        elif messages[-1]["role"] == observation[0]["role"]:
            messages[-1] = _joined(messages[-1], observation[0])
            observation = observation[1:]
        messages += observation
    return messages


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Join two messages into one, with a blank line between them."""
    images = [*first.get("images", []), *second.get("images", [])]
    joined = {**first, **second, "content": f"{first['content']}\n\n{second['content']}"}
    return joined | ({"images": images} if images else {})


def prompt_ids(tokenizer: Any, messages: Messages, tools: list[dict[str, Any]] | None) -> np.ndarray:
    """int32 [n]: a prompt's tokens."""
    return np.array(encode(tokenizer, render(tokenizer, messages, tools)), dtype=np.int32)
