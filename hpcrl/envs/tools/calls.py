"""The calls of functions in a model's text, by the format of its family.

The text comes without special tokens, so that the marks of Mistral ([TOOL_CALLS]) and Llama (<|python_tag|>) may be
missing. A response that only looks like a call in part is one with a problem, which the model is told, and no final
answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

DECODER = json.JSONDecoder(strict=False)  # models write code with line breaks into strings
HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
NAMED = re.compile(r'\{\s*"(?:type|id|name|arguments|parameters)"\s*:')
"""The start of an object that is a call."""
SEPARATOR = re.compile(r"[\s;,]*")
OTHERS = ("<function=", "<arg_key>", "[ARGS]")
"""In templates of formats that share a mark with those known here: Qwen3-Coder, GLM, newer Mistral."""
PYTHON_TAG, TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"


@dataclass(frozen=True)
class ToolCall:
    """A call as it was written. problem: why it is none, empty if it is one."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    problem: str = ""


def hermes(text: str) -> Iterator[ToolCall]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, with other text around: Hermes,
    Qwen2.5 and Qwen3."""
    for found in HERMES.finditer(text):
        yield from _objects(found[1], "within <tool_call> and </tool_call>", most=1)


def llama3_json(text: str) -> Iterator[ToolCall]:
    """The whole text is {"name": ..., "parameters": {...}}, or several of them with semicolons between: Llama 3.1 and
    3.2."""
    before, tag, after = text.partition(PYTHON_TAG)
    text = (after if tag else before).strip()
    if tag or NAMED.match(text):
        yield from _objects(text, "in the response")


def mistral(text: str) -> Iterator[ToolCall]:
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]: Mistral 7B v0.3 and others with its tokenizer v3."""
    before, mark, after = text.partition(TOOL_CALLS)
    text = (after if mark else before).strip()
    if mark or (text.startswith("[") and NAMED.match(text[1:].lstrip())):
        yield from _objects(text.removeprefix("[").removesuffix("]"), "in the list")


FORMATS: dict[str, Callable[[str], Iterator[ToolCall]]] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
}


WRITTEN = {
    "hermes": '<tool_call>{"name": %s, "arguments": %s}</tool_call>',
    "llama3_json": '{"name": %s, "parameters": %s}',
    "mistral": '[{"name": %s, "arguments": %s}]',  # its mark is a special token, which no text may contain
}
"""A call in each format: its name and its arguments, both as JSON."""


def written(format_name: str, name: str, arguments: Mapping[str, Any]) -> str:
    """A response that is this call."""
    return WRITTEN[format_name] % (json.dumps(name), json.dumps(arguments))


def format_of(chat_template: str) -> str:
    """The format that a chat template asks for; hermes for one that shows no tools, since the tools are then described
    so. ValueError if it shows tools in another format."""
    if not re.search(r"\btools\b", chat_template):
        return "hermes"
    if not any(mark in chat_template for mark in OTHERS):
        for mark, name in (("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"), ('"parameters": ', "llama3_json")):
            if mark in chat_template:
                return name
    raise ValueError(
        f"format: the model's chat template asks for calls in none of the known formats; name one of "
        f"{', '.join(FORMATS)} if the model writes it, or take another model"
    )


def _objects(text: str, where: str, most: int = 64) -> Iterator[ToolCall]:
    """The JSON objects that the text consists of, and the first thing that is none."""
    at = SEPARATOR.match(text).end()  # type: ignore[union-attr]  # it matches the empty text
    for number in range(most):
        if at == len(text) and number:
            return
        try:
            found, at = DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            yield ToolCall(problem=f"there is no valid JSON {where}: {_said(error)}")
            return
        yield _call(found)
        at = SEPARATOR.match(text, at).end()  # type: ignore[union-attr]
    if at < len(text):
        yield ToolCall(problem=f"there is more than {most} JSON object{'s' * (most > 1)} {where}")


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else "it is nested too deeply"


def _call(found: Any) -> ToolCall:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall(problem='a call must be an object with "name" and "arguments"')
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # JSON in JSON, as in the messages of OpenAI
        try:
            arguments = DECODER.decode(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(found["name"], problem=f"the arguments of {found['name'][:60]!r} must be an object")
    return ToolCall(found["name"], arguments, found["id"] if isinstance(found.get("id"), str) else "")
