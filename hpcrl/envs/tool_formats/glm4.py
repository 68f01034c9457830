"""<tool_call>NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each argument, then </tool_call>."""

from __future__ import annotations

import re
from typing import Any

from hpcrl.envs.tool_formats.reading import Schemas, ToolCall, ToolFormat, marked, typed

CLOSE = "</tool_call>"
NAME = re.compile(r"\s*([^\s<{\"]{1,256})\s*")
ARGUMENT = re.compile(r"<arg_key>\s*([^<]{0,256}?)\s*</arg_key>\s*<arg_value>")
ENDS = re.compile(r"</arg_value>\s*(?=<arg_key>|</tool_call>|\Z)")


def _scan(text: str, start: re.Match[str], schemas: Schemas) -> tuple[list[ToolCall], int]:
    named = NAME.match(text, start.end())
    if named is None:
        return [ToolCall(problem="a call must begin with the name of the tool")], _after(text, start.end())
    name, at, arguments = named[1], named.end(), dict[str, Any]()
    schema = schemas.get(name, {})
    while found := ARGUMENT.match(text, at):
        ends = ENDS.search(text, found.end())
        if ends is None:
            problem = f"the argument {found[1][:60]!r} of {name[:60]!r} has no </arg_value>"
            return [ToolCall(name, problem=problem)], len(text)
        arguments[found[1]] = typed(text[found.end() : ends.start()], schema.get(found[1]))
        at = ends.end()
    if at < len(text) and not text.startswith(CLOSE, at):
        problem = f"there is text outside the arguments of {name[:60]!r}"
        return [ToolCall(name, problem=problem)], _after(text, at)
    return [ToolCall(name, arguments)], min(len(text), at + len(CLOSE))


def _after(text: str, at: int) -> int:
    close = text.find(CLOSE, at)
    return len(text) if close < 0 else close + len(CLOSE)


SPEC = ToolFormat(about="GLM 4.5 to 4.7, Ling, Laguna", read=marked("<tool_call>", _scan))
