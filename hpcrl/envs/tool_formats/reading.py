"""Parsed calls, and code shared by the formats: skipping reasoning, JSON, values by a schema.

The text includes special tokens, which mark calls in many formats, but not the token that ended the turn. Text from a
model is hostile: no reader raises, and none takes quadratic time.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrl.data.reasoning import REASONING


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no number in JSON")
    return value


DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_finite)
"""Not strict, since models write code with line breaks into strings."""
SPACE = re.compile(r"\s*")
BETWEEN = re.compile(r"[\s,;]*")
"""Separator of two JSON calls."""
OPENED = re.compile("|".join(map(re.escape, REASONING)))
REASONING_MARK = re.compile("|".join(map(re.escape, [*REASONING, *REASONING.values()])))
MAX_STARTS = 500
"""Maximum positions of a response at which a call is tried, since each decoder error counts the lines before it."""
NESTED = "it is nested too deeply"
MAX_LITERAL = 100_000
"""Maximum characters of a value that is parsed as a Python literal."""


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it. `problem` is the reason why it is invalid, or empty."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Parsed:
    """A response: its text without reasoning and calls, and its calls in order."""

    content: str
    calls: tuple[ToolCall, ...] = ()


Schemas = Mapping[str, Mapping[str, Any]]
"""Tool -> parameter -> JSON schema."""
Scan = Callable[[str, "re.Match[str]", Schemas], tuple[list[ToolCall], int]]
"""(text, match of the start, schemas) -> (calls, end). Without calls, the text up to `end` is no call; `end` may then
equal the match's start."""


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    Args:
        about: Which models use this format.
        read: Parses (text, schemas) into a Parsed.
        written: A template for a call's name and arguments (JSON); empty if the format needs special tokens.
    """

    about: str
    read: Callable[[str, Schemas], Parsed]
    written: str = ""

    def parse(self, text: str, tools: Iterable[Mapping[str, Any]] = ()) -> Parsed:
        """Read a response. tools: in OpenAI form; formats with unquoted values need the declared types."""
        return self.read(text, schemas_of(tools))

    def written_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A response with only this call."""
        assert self.written, "other formats are refused before the start"
        return self.written % (json.dumps(name), json.dumps(arguments))


def schemas_of(tools: Iterable[Mapping[str, Any]]) -> Schemas:
    """The parameters of tools in OpenAI form."""
    functions = [tool.get("function", tool) for tool in tools]
    return {f["name"]: (f.get("parameters") or {}).get("properties") or {} for f in functions}


def marked(start: str, scan: Scan) -> Callable[[str, Schemas], Parsed]:
    """The reader of a format whose calls begin with a mark, which the pattern `start` matches."""
    pattern = re.compile(start)

    def read(text: str, schemas: Schemas) -> Parsed:
        at = _after_reasoning(text, pattern, scan, schemas)
        calls: list[ToolCall] = []
        said: list[str] = []
        opened = OPENED.search(text, at)
        starts = 0
        while call := pattern.search(text, at):
            if (starts := starts + 1) > MAX_STARTS:
                calls.append(ToolCall(problem=f"there are more than {MAX_STARTS} calls"))
                at = len(text)
                break
            if opened and opened.start() < at:
                opened = OPENED.search(text, at)
            if opened and opened.start() < call.start():
                said.append(text[at : opened.start()])
                at = _end_of_reasoning(text, opened)
                continue
            found, end = scan(text, call, schemas)
            end = max(end, call.start() + 1)
            said.append(text[at : call.start() if found else end])
            calls += found
            at = end
        opened = OPENED.search(text, at)
        while opened:
            said.append(text[at : opened.start()])
            at = _end_of_reasoning(text, opened)
            opened = OPENED.search(text, at)
        said.append(text[at:])
        return Parsed("".join(said).strip(), tuple(calls))

    return read


def _after_reasoning(text: str, pattern: re.Pattern[str], scan: Scan, schemas: Schemas) -> int:
    """The end of reasoning that began in the prompt, for a text that contains only the closing mark."""
    mark = REASONING_MARK.search(text)
    if mark is None or mark[0] in REASONING:
        return 0
    at = 0
    for _ in range(MAX_STARTS):
        if (call := pattern.search(text, at, mark.start())) is None:
            break
        found, end = scan(text, call, schemas)
        if end > mark.start() and found and not any(one.problem for one in found):
            return 0  # the mark is within an argument
        at = max(end, call.start() + 1)
    return mark.end()


def _end_of_reasoning(text: str, opened: re.Match[str]) -> int:
    close = REASONING[opened[0]]
    end = text.find(close, opened.end())
    return len(text) if end < 0 else end + len(close)


def decoded(text: str, at: int = 0) -> tuple[Any, int]:
    """(value, end) of the JSON that begins at `at`, after spaces. ValueError if it is invalid."""
    try:
        return DECODER.raw_decode(text, SPACE.match(text, at).end())  # type: ignore[union-attr]  # it always matches
    except RecursionError:
        raise ValueError(NESTED) from None


def no_json(where: str, error: Exception) -> ToolCall:
    """A call whose JSON is invalid."""
    return ToolCall(problem=f"there is no valid JSON {where}: {error}")


def object_call(
    found: Any, name_key: str = "name", arguments_keys: Sequence[str] = ("arguments", "parameters")
) -> ToolCall:
    """The call in a JSON object with name and arguments."""
    if isinstance(found, dict) and isinstance(inner := found.get("function"), dict):
        found = {"id": found.get("id")} | inner
    if not isinstance(found, dict) or not isinstance(found.get(name_key), str):
        return ToolCall(problem=f'a call must be an object with "{name_key}" and "{arguments_keys[0]}"')
    arguments: Any = next((found[key] for key in arguments_keys if key in found), {})
    return named_call(found[name_key], arguments, found.get("id", found.get("tool_call_id")))


def named_call(name: str, arguments: Any, call_id: Any = "") -> ToolCall:
    """The call of this name, whose arguments may be JSON text, as in OpenAI messages."""
    if isinstance(arguments, str):
        try:
            arguments = DECODER.decode(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name, problem=f"the arguments of {name[:60]!r} must be an object")
    return ToolCall(name, arguments, call_id if isinstance(call_id, str) else "")


def json_call(text: str, at: int, close: str, name: str, call_id: str = "") -> tuple[ToolCall, int]:
    """(call, end) of a call whose arguments are the JSON at `at`, up to a mark, which may be missing at the end."""
    where = f"in the arguments of {name[:60]!r}"
    try:
        found, end = decoded(text, at)
    except ValueError as error:
        close_at = text.find(close, at)
        return ToolCall(name, problem=no_json(where, error).problem), _after(text, close_at, close)
    close_at = text.find(close, end)
    if text[end : len(text) if close_at < 0 else close_at].strip():
        return ToolCall(name, problem=f"there is text after the JSON {where}"), _after(text, close_at, close)
    return named_call(name, found, call_id), _after(text, close_at, close)


def _after(text: str, at: int, close: str) -> int:
    return len(text) if at < 0 else at + len(close)


def typed(text: str, schema: Any) -> Any:
    """The value of an argument that is written without quotes, by its JSON schema: the text itself if the schema allows
    only texts, or no other type that the text could have; otherwise the text parsed as JSON, or as a Python literal."""
    types = _types(schema)
    value = text if types == {"string"} else _value(text.strip())
    if isinstance(value, str):
        return text
    if not types or _kinds(value) & types:
        return value
    if "integer" in types and isinstance(value, float) and value.is_integer():
        return int(value)
    return text if "string" in types else value


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty for any."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else {kind for kind in given or () if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        parts = schema.get(key)
        types |= {kind for part in parts for kind in _types(part)} if isinstance(parts, list) else set()
    if not types and isinstance(schema.get("enum"), list):
        types = {kind for value in schema["enum"] for kind in _kinds(value)}
    return types | ({"null"} if types and schema.get("nullable") is True else set())


def _kinds(value: Any) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case dict():
            return {"object"}
        case list():
            return {"array"}
    return {"null"}


def _value(text: str) -> Any:
    """The text parsed as JSON, or as a Python literal; the text itself if it is neither."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        pass
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    if text[:1] in ("{", "[") and len(text) <= MAX_LITERAL:
        try:
            found = ast.literal_eval(text)
            json.dumps(found)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return text
        return found
    return text
