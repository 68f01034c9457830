"""Tokens of an environment's observations: the first prompt, the tokens between two turns of the model, and the prompts
of turns that are sequences of their own."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError

from hpcrl.data.chat import encode, render
from hpcrl.data.rows import Messages
from hpcrl.envs.base import Observation, cut, num_chars

CONTENT = "0CONTENT0"
"""Placeholder for the model's text; letters and digits, which no template trims or escapes."""
RESULT = "0RESULT0"
TOOLS = """\
You may call one or more functions. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>
For each call, write a JSON object with the name of the function and its arguments within <tool_call></tool_call>:
<tool_call>
{"name": <name of the function>, "arguments": <object of its arguments>}
</tool_call>"""
"""How tools are described to a model whose chat template does not show them."""


def chat_template(tokenizer: Any) -> str:
    """The tokenizer's chat template, that for tools if there are several; empty without one."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else template.get("tool_use") or template.get("default", "")


def as_messages(observation: Any) -> Messages:
    """An observation in chat form. TypeError for one that is neither text nor messages."""
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
    """The tools of a row and those that an environment adds, in OpenAI form; of two with one name the environment's.
    TypeError for what is no tool."""
    try:
        names = {tool["function"]["name"] for tool in added}
    except (KeyError, TypeError) as error:
        raise TypeError("info['tools'] must be a list of tools: {'type': 'function', 'function': {...}}") from error
    return [*(tool for tool in known or [] if tool.get("function", {}).get("name") not in names), *added]


def first_prompt(
    tokenizer: Any, row: dict[str, Any], observation: Any, added: bool = False, examples: Messages | None = None
) -> tuple[Messages, np.ndarray]:
    """(messages, int32 token ids) of the first prompt of an episode; no tokens if the observation is empty, so that the
    row's own prompt stays, unless the environment has added tools to those of the row, or there are examples. row:
    {messages, tools, ...}. examples: messages that stand after those of the system. TypeError as in as_messages().

    A chat template that does not show tools (Gemma 2, Phi-3) gets them in the text of the first user message.
    """
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
    if added and render(tokenizer, messages, tools) == render(tokenizer, messages, None):
        messages, tools = _described(messages, tools), None
    return messages, prompt_ids(tokenizer, messages, tools)


def fitting(
    observation: Observation, room: int, tokens: Callable[[Observation], tuple[Messages, np.ndarray]]
) -> tuple[Messages, np.ndarray]:
    """What `tokens` gives for the observation with as much of the beginning and the end of its longest message as
    leaves at most `room` tokens; with nothing of it if that is still too much."""
    fits, too_many = 0, num_chars(observation)
    while too_many - fits > 1:
        count = (fits + too_many) // 2
        if len(tokens(cut(observation, count))[1]) > room:
            too_many = count
        else:
            fits = count
    return tokens(cut(observation, fits))


def window(shown: Sequence[Messages], said: Sequence[str], history: int) -> Messages:
    """The messages of the prompt of a turn by steps: the first prompt, the latest `history` turns before it (the
    observation, and what the model said), and the current observation. What a tool has answered never stands without
    the turn that called it.

    shown: the first prompt and all observations since; said: the turns, one less. Where turns are left out, messages of
    one role that meet are joined to one, two lines apart, because not every chat template takes two.
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
    """Two messages as one."""
    images = [*first.get("images", []), *second.get("images", [])]
    joined = {**first, **second, "content": f"{first['content']}\n\n{second['content']}"}
    return joined | ({"images": images} if images else {})


def prompt_ids(tokenizer: Any, messages: Messages, tools: list[dict[str, Any]] | None) -> np.ndarray:
    """int32 [n]: the tokens of a prompt."""
    return np.array(encode(tokenizer, render(tokenizer, messages, tools)), dtype=np.int32)


def observation_ids(
    tokenizer: Any, observation: Messages, last_token: int, tools: list[dict[str, Any]] | None = None
) -> np.ndarray:
    """int32 [n]: the tokens after a model turn that ends with `last_token`, up to the start of the next model turn.

    This is the chat template's text between the contents of two model turns around the observation, without the token
    that ends a model turn if the model has ended its turn with that or with another special token (Llama 3.1 ends the
    call of a tool with <|eom_id|>). Tools speak as a user if the template knows no tools. Without a template: the
    contents of the messages. ValueError if the template renders no model turn.
    """
    if not getattr(tokenizer, "chat_template", None):
        text = render(tokenizer, observation, None)
        return np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
    ids = encode(tokenizer, _after_content(tokenizer, heard(tokenizer, observation, tools), tools))
    added = tokenizer.added_tokens_decoder.get(last_token)
    # Only an added token ends a turn: a newline of the model is content, even if the template adds another.
    if not ids or added is None:
        return np.array(ids, dtype=np.int32)
    if ids[0] == last_token or (added.special and ids[0] == _end(tokenizer, json.dumps(tools))):
        ids = ids[1:]
    return np.array(ids, dtype=np.int32)


def _after_content(tokenizer: Any, after: Messages, tools: list[dict[str, Any]] | None, ask: bool = True) -> str:
    """The rendered text after a model turn that these messages follow."""
    turn = [{"role": "user", "content": "0"}, {"role": "assistant", "content": CONTENT}]
    _, found, following = render(tokenizer, [*turn, *after], tools, ask).partition(CONTENT)
    if not found:
        raise ValueError("the chat template does not show an assistant turn that an observation follows")
    return following


@functools.lru_cache(maxsize=64)
def _end(tokenizer: Any, tools: str) -> int | None:
    """The special token that the template writes at the end of a model turn. tools: as JSON."""
    ids = encode(tokenizer, _after_content(tokenizer, [], json.loads(tools), ask=False))
    added = tokenizer.added_tokens_decoder.get(ids[0]) if ids else None
    return ids[0] if added is not None and added.special else None


def heard(tokenizer: Any, observation: Messages, tools: list[dict[str, Any]] | None) -> Messages:
    """The observation as the template can show it: results of tools that stand one after another as one user message,
    in the form of Qwen2.5 and Hermes, if it knows no role for them."""
    keys = {key for message in observation if message["role"] == "tool" for key in message}
    if not keys or not chat_template(tokenizer) or _shows_results(tokenizer, keys, tools):
        return observation
    heard: Messages = []
    for results, messages in itertools.groupby(observation, lambda message: message["role"] == "tool"):
        if results:
            told = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in messages]
            heard.append({"role": "user", "content": "\n".join(told)})
        else:
            heard += messages
    return heard


def _shows_results(tokenizer: Any, keys: set[str], tools: list[dict[str, Any]] | None) -> bool:
    """Whether the template shows a tool's result that has these keys."""
    result = {"role": "tool", "content": RESULT, "name": "f", "tool_call_id": "123456789"}
    try:
        following = _after_content(tokenizer, [{key: result.get(key, "") for key in keys}], tools)
    except TemplateError:  # Gemma 2 and others raise for a role that they do not know
        return False
    return RESULT in following


def _described(messages: Messages, tools: list[dict[str, Any]]) -> Messages:
    """The messages with the tools before the text of the first user message, or of the first message at all."""
    lines = "\n".join(json.dumps(tool) for tool in tools)
    place = next((n for n, message in enumerate(messages) if message["role"] == "user"), 0)
    told = {**messages[place], "content": f"{TOOLS.replace('{tools}', lines)}\n\n{messages[place]['content']}"}
    return [*messages[:place], told, *messages[place + 1 :]]
