"""[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] of Mistral's tokenizers to v7, and [TOOL_CALLS]name[ARGS]{...},
optionally with [CALL_ID]id before [ARGS], of later tokenizers."""

from __future__ import annotations

import re

from hpcrl.envs.tool_formats.reading import (
    BETWEEN,
    Schemas,
    ToolCall,
    ToolFormat,
    decoded,
    marked,
    named_call,
    no_json,
    object_call,
)

MARK = r"\[TOOL_CALLS\]"
BARE = r'\A\s*(?=\[\s*\{\s*"(?:type|id|name|arguments|parameters)"\s*:)'
"""A list without the mark, as an expert writes it, since plain text cannot contain a special token."""
NAMED = re.compile(r"\s*([^\s\[\]{}\"]{1,256})\s*(?:\[CALL_ID\]\s*([^\s\[\]{}\"]{1,64})\s*)?(?:\[ARGS\])?\s*(?=\{)")


def _scan(text: str, start: re.Match[str], schemas: Schemas) -> tuple[list[ToolCall], int]:
    named = NAMED.match(text, start.end())
    where = f"in the arguments of {named[1][:60]!r}" if named else "in the list"
    try:
        found, end = decoded(text, named.end() if named else start.end())
    except ValueError as error:
        after = text.find("[TOOL_CALLS]", start.end())
        return [no_json(where, error)], len(text) if after < 0 else after
    if named:
        return [named_call(named[1], found, named[2] or "")], end
    entries = found if isinstance(found, list) else [found]
    return [object_call(entry) for entry in entries], BETWEEN.match(text, end).end()  # type: ignore[union-attr]


SPEC = ToolFormat(
    about="Mistral, Ministral, Devstral, Magistral",
    read=marked(f"{MARK}|{BARE}", _scan),
    written='[{"name": %s, "arguments": %s}]',
)
