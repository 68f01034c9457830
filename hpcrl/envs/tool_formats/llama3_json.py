"""{"name": ..., "parameters": {...}}, several separated by semicolons or as a list, with or without text before."""

from __future__ import annotations

import json
import re

from hpcrl.envs.tool_formats.reading import (
    BETWEEN,
    Schemas,
    ToolCall,
    ToolFormat,
    decoded,
    marked,
    no_json,
    object_call,
)

PYTHON_TAG = r"<\|python_tag\|>"
OBJECT = r'(?=\{\s*"(?:type|id|name|arguments|parameters|function)"\s*:)'
"""The start of an object that may be a call."""
SURELY = re.compile(r'\{\s*"name"\s*:\s*"[^"\\]{1,99}"\s*,\s*"(?:arguments|parameters)"\s*:')
"""The start of an object intended as a call, even if its JSON is broken or it is in the middle of a text."""
WHERE = "in the response"


def _scan(text: str, start: re.Match[str], schemas: Schemas) -> tuple[list[ToolCall], int]:
    begins = start[0].startswith("<") or not text[: start.start()].strip()
    try:
        found, end = decoded(text, start.end())
    except ValueError as error:
        if begins or SURELY.match(text, start.end()):
            return [no_json(WHERE, error)], len(text)
        return [], error.pos if isinstance(error, json.JSONDecodeError) else len(text)
    entries = found if isinstance(found, list) else [found]
    if not begins and not all(_is_call(entry) for entry in entries):
        return [], end
    end = BETWEEN.match(text, end).end()  # type: ignore[union-attr]  # it always matches
    return [object_call(entry) for entry in entries], end + (text[end : end + 1] == "]")


def _is_call(found: object) -> bool:
    """Whether an object within a text is a call and not other JSON."""
    if not isinstance(found, dict):
        return False
    inner = found["function"] if isinstance(found.get("function"), dict) else found
    return isinstance(inner.get("name"), str) and not inner.keys().isdisjoint(("arguments", "parameters"))


SPEC = ToolFormat(
    about="Llama 3.1 to 3.3, Llama 4",
    read=marked(rf"{PYTHON_TAG}|(?:\[\s*)?{OBJECT}", _scan),
    written='{"name": %s, "parameters": %s}',
)
