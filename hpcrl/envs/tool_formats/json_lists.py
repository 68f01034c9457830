"""Formats that write all calls of a turn as one JSON list, or as objects one after another, between two marks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpcrl.envs.tool_formats.reading import (
    BETWEEN,
    Scan,
    Schemas,
    ToolCall,
    ToolFormat,
    decoded,
    marked,
    no_json,
    object_call,
)


def _between(
    close: str, where: str, name: str = "name", arguments: Sequence[str] = ("arguments", "parameters")
) -> Scan:
    """Reads lists and objects up to the mark `close`, which may be missing at the end."""

    def scan(text: str, start: re.Match[str], schemas: Schemas) -> tuple[list[ToolCall], int]:
        calls: list[ToolCall] = []
        at = start.end()
        while not calls or (at < len(text) and text[at] in "[{"):
            try:
                found, at = decoded(text, at)
            except ValueError as error:
                end = text.find(close, at)
                return [*calls, no_json(where, error)], len(text) if end < 0 else end + len(close)
            entries = found if isinstance(found, list) else [found]
            calls += [object_call(entry, name, arguments) for entry in entries]
            at = BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it always matches
        return calls, at + len(close) if text.startswith(close, at) else at

    return scan


NEMOTRON = ToolFormat(
    about="Nemotron Nano v2: <TOOLCALL>[{...}, ...]</TOOLCALL>",
    read=marked("<TOOLCALL>", _between("</TOOLCALL>", "after <TOOLCALL>")),
)
APRIEL = ToolFormat(
    about="Apriel, Jamba, MiniMax-M1: <tool_calls>[{...}, ...]</tool_calls>",
    read=marked("<tool_calls>", _between("</tool_calls>", "after <tool_calls>")),
)
GRANITE = ToolFormat(
    about="Granite 3: <|tool_call|>[{...}, ...]",
    read=marked(r"<\|tool_call\|>|<tool_call>(?=\s*\[)", _between("</tool_call>", "after <|tool_call|>")),
)
PHI4_MINI = ToolFormat(
    about="Phi-4-mini: functools[{...}, ...]",
    read=marked(r"functools(?=\[)", _between("<|/tool_call|>", "after functools")),
)
COHERE = ToolFormat(
    about="Command R7B, Cohere2-MoE: <|START_ACTION|>[{...}, ...]<|END_ACTION|>",
    read=marked(
        r"<\|START_ACTION\|>",
        _between("<|END_ACTION|>", "after <|START_ACTION|>", "tool_name", ("parameters", "arguments")),
    ),
)
