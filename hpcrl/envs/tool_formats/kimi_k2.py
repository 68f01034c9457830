"""<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>, between marks of a section."""

from __future__ import annotations

import re

from hpcrl.envs.tool_formats.reading import Schemas, ToolCall, ToolFormat, json_call, marked

START = r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>"
HEADER = re.compile(r"\s*((?:functions\.)?([^\s<>:]{1,256}?)(?::\d{1,9})?)\s*<\|tool_call_argument_begin\|>")
END = re.compile(r"\s*<\|tool_calls_section_end\|>")
CLOSE = "<|tool_call_end|>"


def _scan(text: str, start: re.Match[str], schemas: Schemas) -> tuple[list[ToolCall], int]:
    header = HEADER.match(text, start.end())
    if header is None:
        close = text.find(CLOSE, start.end())
        problem = "a call must begin with functions.NAME:NUMBER and <|tool_call_argument_begin|>"
        call, at = ToolCall(problem=problem), len(text) if close < 0 else close + len(CLOSE)
    else:
        call, at = json_call(text, header.end(), CLOSE, header[2], header[1])
    end = END.match(text, at)
    return [call], end.end() if end else at


SPEC = ToolFormat(about="Kimi K2", read=marked(START, _scan))
