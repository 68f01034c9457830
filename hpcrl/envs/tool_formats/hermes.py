"""<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them with other text around."""

from __future__ import annotations

import re

from hpcrl.envs.tool_formats.reading import Schemas, ToolCall, ToolFormat, decoded, marked, no_json, object_call

CLOSE = "</tool_call>"
WHERE = f"within <tool_call> and {CLOSE}"


def _scan(text: str, start: re.Match[str], schemas: Schemas) -> tuple[list[ToolCall], int]:
    close = text.find(CLOSE, start.end())
    after = len(text) if close < 0 else close + len(CLOSE)
    try:
        found, end = decoded(text, start.end())
    except ValueError as error:
        return [no_json(WHERE, error)], after
    if end > close >= 0:  # the mark is within a string
        close = text.find(CLOSE, end)
        after = len(text) if close < 0 else close + len(CLOSE)
    if text[end : len(text) if close < 0 else close].strip():
        return [object_call(found), ToolCall(problem=f"there is more than 1 JSON object {WHERE}")], after
    return [object_call(found)], after


SPEC = ToolFormat(
    about="Hermes, Qwen2.5, Qwen3, Granite 4, MiMo",
    read=marked("<tool_call>", _scan),
    written='<tool_call>{"name": %s, "arguments": %s}</tool_call>',
)
