"""Formats with an element for every argument: Qwen3-Coder, Seed-OSS, MiniMax-M2, DeepSeek V3.2 and V4."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hpcrl.envs.tool_formats.reading import SPACE, Schemas, ToolCall, ToolFormat, marked, typed


@dataclass(frozen=True)
class Marks:
    """The marks of a format.

    Args:
        opens: The mark before the first call; `closes` follows the last call.
        call: A pattern for a call's opening mark, with the function's name as first group; `call_ends` closes the call.
        parameter: A pattern for a parameter's opening mark, with the name as first group and, in some formats, a
            second group that is "true" for text and "false" for JSON; `parameter_ends` closes the parameter.
        lines: Whether values are on separate lines.
        bare: Whether calls are also read without `opens`.
    """

    opens: str
    closes: str
    call: str
    call_ends: str
    parameter: str
    parameter_ends: str
    lines: bool = False
    bare: bool = False


def _reader(marks: Marks) -> Any:
    call, parameter = re.compile(marks.call), re.compile(marks.parameter)
    call_ends, parameter_ends = re.escape(marks.call_ends), re.escape(marks.parameter_ends)
    value_ends = re.compile(
        rf"\n?{parameter_ends}(?=\s*(?:{marks.parameter}|{call_ends}|\Z))"  # the value itself may contain the mark
        rf"|\n(?=\s*{marks.parameter}|\s*{call_ends})"  # the model has omitted the mark
    )

    def one(text: str, start: re.Match[str], schema: Any) -> tuple[ToolCall, int]:
        name, at, arguments = start[1], start.end(), dict[str, Any]()
        while True:
            at = SPACE.match(text, at).end()  # type: ignore[union-attr]  # it always matches
            if at == len(text) or text.startswith(marks.call_ends, at):
                return ToolCall(name, arguments), min(len(text), at + len(marks.call_ends))
            found = parameter.match(text, at)
            if found is None:
                problem = f"there is text outside the arguments of {name[:60]!r}"
                end = text.find(marks.call_ends, at)
                return ToolCall(name, problem=problem), len(text) if end < 0 else end + len(marks.call_ends)
            ends = value_ends.search(text, found.end())
            if ends is None:
                problem = f"the argument {found[1][:60]!r} of {name[:60]!r} has no {marks.parameter_ends}"
                return ToolCall(name, problem=problem), len(text)
            value = text[found.end() : ends.start()]
            if not marks.lines and ends[0].startswith("\n") and ends[0] != "\n":
                value += "\n"
            elif marks.lines:
                value = value.removeprefix("\n")
            wanted = {"type": "string"} if (found.lastindex or 0) > 1 and found[2] == "true" else schema.get(found[1])
            arguments[found[1]] = typed(value, wanted)
            at = max(ends.end(), found.end())

    def scan(text: str, start: re.Match[str], schemas: Schemas) -> tuple[list[ToolCall], int]:
        calls: list[ToolCall] = []
        at = start.end() if start[0].startswith(marks.opens) else start.start()
        while True:
            at = SPACE.match(text, at).end()  # type: ignore[union-attr]
            if text.startswith(marks.closes, at):
                at += len(marks.closes)
                break
            if (opened := call.match(text, at)) is None:
                break
            found, at = one(text, opened, schemas.get(opened[1], {}))
            calls.append(found)
        if not calls:
            end = text.find(marks.closes, at)
            problem = f"after {marks.opens} there is no call"
            return [ToolCall(problem=problem)], max(at, len(text) if end < 0 else end + len(marks.closes))
        return calls, at

    return marked(re.escape(marks.opens) + (f"|{marks.call}" if marks.bare else ""), scan)


def _named(tag: str) -> str:
    """A pattern of <TAG name="...">."""
    return rf'<{tag} name="([^"\n]{{0,256}})">'


QWEN3_CODER = ToolFormat(
    about="Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5",
    read=_reader(
        Marks(
            opens="<tool_call>",
            closes="</tool_call>",
            call=r"<function=([^>\n]{1,256})>",
            call_ends="</function>",
            parameter=r"<parameter=([^>\n]{1,256})>",
            parameter_ends="</parameter>",
            lines=True,
            bare=True,
        )
    ),
)
SEED_OSS = ToolFormat(
    about="Seed-OSS",
    read=_reader(
        Marks(
            opens="<seed:tool_call>",
            closes="</seed:tool_call>",
            call=r"<function=([^>\n]{1,256})>",
            call_ends="</function>",
            parameter=r"<parameter=([^>\n]{1,256})>",
            parameter_ends="</parameter>",
        )
    ),
)
MINIMAX_M2 = ToolFormat(
    about="MiniMax M2",
    read=_reader(
        Marks(
            opens="<minimax:tool_call>",
            closes="</minimax:tool_call>",
            call=_named("invoke"),
            call_ends="</invoke>",
            parameter=_named("parameter"),
            parameter_ends="</parameter>",
        )
    ),
)


def _dsml(calls: str) -> ToolFormat:
    return ToolFormat(
        about="DeepSeek V3.2" if calls == "function_calls" else "DeepSeek V4",
        read=_reader(
            Marks(
                opens=f"<｜DSML｜{calls}>",
                closes=f"</｜DSML｜{calls}>",
                call=_named("｜DSML｜invoke"),
                call_ends="</｜DSML｜invoke>",
                parameter=r'<｜DSML｜parameter name="([^"\n]{0,256})" string="(true|false)">',
                parameter_ends="</｜DSML｜parameter>",
            )
        ),
    )


DEEPSEEK_V3_2, DEEPSEEK_V4 = _dsml("function_calls"), _dsml("tool_calls")
