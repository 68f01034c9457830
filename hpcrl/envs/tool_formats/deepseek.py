"""DeepSeek's formats with one JSON object per call: in a code block for V3 and R1, without one for V3.1. V3.2 and V4
write parameters (xml_parameters)."""

from __future__ import annotations

import re

from hpcrl.envs.tool_formats.reading import Scan, Schemas, ToolCall, ToolFormat, json_call, marked

START = r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
CLOSE = "<｜tool▁call▁end｜>"
END = re.compile(r"\s*<｜tool▁calls▁end｜>")


def _scanned(header: re.Pattern[str], form: str, fenced: bool) -> Scan:
    def scan(text: str, start: re.Match[str], schemas: Schemas) -> tuple[list[ToolCall], int]:
        found = header.match(text, start.end())
        close = text.find(CLOSE, start.end())
        after = len(text) if close < 0 else close + len(CLOSE)
        if found is None:
            call = ToolCall(problem=f"a call must be {form}")
        elif fenced:
            ends = text.rfind("```", found.end(), len(text) if close < 0 else close)
            body = text[found.end() : ends] if ends >= 0 else text[found.end() : after]
            call, _ = json_call(body, 0, CLOSE, found[1])
        else:
            call, after = json_call(text, found.end(), CLOSE, found[1])
        end = END.match(text, after)
        return [call], end.end() if end else after

    return scan


V3 = ToolFormat(
    about="DeepSeek V3 and R1",
    read=marked(
        START,
        _scanned(
            re.compile(r"\s*function\s*<｜tool▁sep｜>\s*([^\s<]{1,256})\s*```(?:json)?\s*"),
            "function<｜tool▁sep｜>NAME, and its arguments as a block of code",
            fenced=True,
        ),
    ),
)
V3_1 = ToolFormat(
    about="DeepSeek V3.1",
    read=marked(
        START,
        _scanned(
            re.compile(r"\s*([^\s<]{1,256}?)\s*<｜tool▁sep｜>"), "NAME<｜tool▁sep｜> and its arguments", fenced=False
        ),
    ),
)
