"""Derives a model's tool format from its chat template: renders calls and finds the format that reads them back."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpcrl.data.templates import FolderTemplate
from hpcrl.envs.environment import shortened
from hpcrl.envs.tool_formats.reading import Parsed, ToolCall, schemas_of
from hpcrl.envs.tool_formats.table import FORMATS

ASKED = "0ASKED0"
"""Content of the user message; letters and digits, which no template trims or escapes."""
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {
        "text": "a \"quoted\" 'text' <b>\n\twith\\lines & ünïcødé 日本\n",
        "digits": "007",
        "count": -3,
        "share": 2.5,
        "sure": True,
        "nothing": None,
        "nested": {"list": [1, 0.5, None, False, {}, [], "x"], "of": {"text": 'in "it"'}},
        "empty": {},
    },
    {},
)
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
NAMES = ("probe_first", "probe_second")
TYPES = {
    "text": "string",
    "digits": "string",
    "count": "integer",
    "share": "number",
    "sure": "boolean",
    "nothing": "integer",  # some templates do not support the type null
    "nested": "object",
    "empty": "object",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": TYPES[key], "description": "A parameter."} for key in arguments},
                "required": [],
                "additionalProperties": False,
            },
        },
    }
    for name, arguments in zip(NAMES, ARGUMENTS, strict=True)
]
MAX_SHOWN = 400
"""Maximum characters of a rendered call that an error shows."""


@dataclass(frozen=True)
class _Rendered:
    """The assistant's part of a rendered dialogue; calls: the calls whose names it contains."""

    text: str
    calls: tuple[ToolCall, ...]


def check(options: Any, chat_template: str) -> None:
    """ValueError if a model with this chat template cannot use an environment whose options have this `format`."""
    derive(chat_template, options.format)


@functools.lru_cache(maxsize=64)
def derive(chat_template: str, wanted: str = "auto") -> str:
    """The name of a chat template's tool format. Without a template, and if the template shows no tools, the format is
    hermes, and the first prompt describes the tools. ValueError if the wanted format, or with auto every format, does
    not read the rendered calls back unchanged.

    Args:
        wanted: The configured format. It is used unchecked if the template renders no calls.
    """
    if not chat_template:
        return "hermes" if wanted == "auto" else wanted
    try:
        if not _shows_tools(chat_template) and wanted in ("auto", "hermes"):
            return "hermes"
        renderings = list(_renderings(chat_template))
    except _Unrenderable as error:
        if wanted != "auto":
            return wanted
        raise ValueError(
            f"format: the model's chat template cannot be rendered with tools: {error}; {_remedy()}"
        ) from error
    if not renderings:
        if wanted != "auto":
            return wanted
        raise ValueError(f"format: the model's chat template shows tools but renders no calls; {_remedy()}")
    names = FORMATS.paths if wanted == "auto" else [wanted]
    for rendered in renderings:
        for name in names:
            if _reads(name, rendered):
                return name
    text = shortened(renderings[0].text, MAX_SHOWN)
    if wanted == "auto":
        raise ValueError(
            f"format: the model's chat template writes calls in an unknown format, as {text!r}; {_remedy()}"
        )
    told = _told(FORMATS[wanted].parse(renderings[0].text, TOOLS))
    raise ValueError(
        f"format: {wanted} does not read the calls of the model's chat template, which are {text!r}; it reads {told}; "
        "use format=auto"
    )


def _shows_tools(chat_template: str) -> bool:
    """Whether the template shows tools; true if it raises only without them. _Unrenderable if it raises with them."""
    with_tools = _shown(chat_template, TOOLS)
    try:
        return with_tools != _shown(chat_template, None)
    except _Unrenderable:
        return True


def _remedy() -> str:
    return f"set the format that the model writes ({', '.join(FORMATS.paths)}), or use another model"


def _reads(name: str, rendered: _Rendered) -> bool:
    found = FORMATS[name].read(rendered.text, schemas_of(TOOLS)).calls
    return [(call.name, _exactly(call.arguments), call.problem) for call in found] == [
        (call.name, _exactly(call.arguments), "") for call in rendered.calls
    ]


def _exactly(arguments: Mapping[str, Any]) -> str:
    """Arguments for an exact comparison, in which True differs from 1, and 2 from 2.0."""
    return json.dumps(arguments, sort_keys=True)


def _told(parsed: Parsed) -> str:
    if not parsed.calls:
        return "no call"
    calls = [call.problem or f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in parsed.calls]
    return repr(shortened("; ".join(calls), MAX_SHOWN))


class _Unrenderable(Exception):
    """The template raises."""


def _renderings(chat_template: str) -> Iterator[_Rendered]:
    """The ways in which the template renders calls: two calls, or one for templates that allow only one; arguments as
    an object or as JSON text. _Unrenderable if it raises for all."""
    before = _shown(chat_template, TOOLS, ask=True), _shown(chat_template, TOOLS)
    failures = []
    ways = list(itertools.product((2, 1), (False, True), ("", None)))
    for count, as_text, content in ways:
        message = {"role": "assistant", "content": content, "tool_calls": _calls(count, as_text)}
        try:
            whole = _shown(chat_template, TOOLS, message)
        except _Unrenderable as error:
            failures.append(error)
            continue
        text = next((whole[len(said) :] for said in before if whole.startswith(said)), whole.rpartition(ASKED)[2])
        shown = [number for number in range(count) if NAMES[number] in text]
        if shown:
            yield _Rendered(text, tuple(ToolCall(NAMES[number], ARGUMENTS[number]) for number in shown))
    if len(failures) == len(ways):
        raise failures[0]


def _calls(count: int, as_text: bool) -> list[dict[str, Any]]:
    """Calls in OpenAI form, with ids of the length that Mistral's template requires."""
    return [
        {
            "id": f"call0000{number}",
            "type": "function",
            "function": {
                "name": NAMES[number],
                "arguments": json.dumps(given, ensure_ascii=False) if as_text else given,
            },
        }
        for number, given in enumerate(ARGUMENTS[:count])
    ]


def _shown(chat_template: str, tools: Any, message: dict[str, Any] | None = None, ask: bool = False) -> str:
    """The text of a dialogue that ends with this assistant message, if any. _Unrenderable if the template raises."""
    text, failed = None, None
    for asked in (ASKED, [{"type": "text", "text": ASKED}]):  # some vision models' templates accept only parts
        dialogue = [{"role": "user", "content": asked}, *([message] if message else [])]
        try:
            text = FolderTemplate(chat_template, ENDS).apply_chat_template(dialogue, tools, add_generation_prompt=ask)
        except Exception as error:  # a template's expressions may raise any exception
            failed = failed or error
            continue
        if ASKED in text:
            return text
    if text is None:
        raise _Unrenderable(" ".join(f"{type(failed).__name__}: {failed}".split())) from failed
    return text
