"""<|tool_call>call:NAME{key:value,...}<tool_call|>: objects without quotes around keys, texts between <|"|>."""

from __future__ import annotations

import re
from typing import Any

from hpcrl.envs.tool_formats.reading import NESTED, Schemas, ToolCall, ToolFormat, marked, typed

CLOSE, QUOTE = "<tool_call|>", '<|"|>'
NAME = re.compile(r"\s*call:\s*([^\s{}<]{1,256})\s*(?=\{)")
KEY = re.compile(r'\s*(?:<\|"\|>)?([^:{}\[\],<>]{1,256}?)(?:<\|"\|>)?\s*:')
BARE = re.compile(r"[^,{}\[\]<]*")
SPACE = re.compile(r"\s*")
MAX_DEPTH = 100


class _Broken(ValueError):
    """The text is not a value in this format."""


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    if depth > MAX_DEPTH:
        raise _Broken(NESTED)
    at = _skip(text, at)
    if text.startswith(QUOTE, at):
        end = text.find(QUOTE, at + len(QUOTE))
        if end < 0:
            raise _Broken('a text has no second <|"|>')
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    if text.startswith("{", at):
        return _object(text, at, depth)
    if text.startswith("[", at):
        return _list(text, at, depth)
    bare = BARE.match(text, at)
    assert bare is not None, "it matches the empty text"
    if not bare[0].strip():
        raise _Broken(f"a value is missing at {text[at : at + 20]!r}")
    return typed(bare[0].strip(), None), bare.end()


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = _skip(text, at + 1)
    while not text.startswith("}", at):
        key = KEY.match(text, at)
        if key is None:
            raise _Broken(f"a key is missing at {text[at : at + 20]!r}")
        found[key[1]], at = _value(text, key.end(), depth + 1)
        at = _next(text, at, "}")
    return found, at + 1


def _list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    at = _skip(text, at + 1)
    while not text.startswith("]", at):
        value, at = _value(text, at, depth + 1)
        found.append(value)
        at = _next(text, at, "]")
    return found, at + 1


def _next(text: str, at: int, close: str) -> int:
    """Offset after a comma, or at the closing bracket of the object or list."""
    at = _skip(text, at)
    if text.startswith(",", at):
        return _skip(text, at + 1)
    if not text.startswith(close, at):
        raise _Broken(f"there is no comma and no {close} at {text[at : at + 20]!r}")
    return at


def _skip(text: str, at: int) -> int:
    return SPACE.match(text, at).end()  # type: ignore[union-attr]  # it always matches


def _scan(text: str, start: re.Match[str], schemas: Schemas) -> tuple[list[ToolCall], int]:
    named = NAME.match(text, start.end())
    if named is None:
        return [ToolCall(problem="a call must be call:NAME{...}")], _after(text, start.end())
    try:
        arguments, at = _object(text, named.end(), 0)
    except _Broken as error:
        problem = f"the arguments of {named[1][:60]!r} cannot be read: {error}"
        return [ToolCall(named[1], problem=problem)], _after(text, named.end())
    at = _skip(text, at)
    if at < len(text) and not text.startswith(CLOSE, at):
        problem = f"there is text after the arguments of {named[1][:60]!r}"
        return [ToolCall(named[1], problem=problem)], _after(text, at)
    return [ToolCall(named[1], arguments)], min(len(text), at + len(CLOSE))


def _after(text: str, at: int) -> int:
    close = text.find(CLOSE, at)
    return len(text) if close < 0 else close + len(CLOSE)


SPEC = ToolFormat(about="Gemma 4", read=marked(r"<\|tool_call>", _scan))
