"""The scored responses of one side of a comparison. Files are read line by line, and only scores are kept; texts are
read again when they are shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hpcrl.system.files import open_regular

By = Literal["prompt", "row"]
"""What identifies a prompt of a set: its content, or its row in the set's file."""


@dataclass(frozen=True, slots=True)
class ComparedResponse:
    """A response's score, whether its reward failed (then the score is 0), and its line: file and offset, bytes."""

    score: float
    failed: bool
    file: Path
    offset: int


class ResponseTexts(NamedTuple):
    """The texts of a response's line. `answer` was found in the response, `gold` is the right one; empty if unknown."""

    prompt: str
    response: str
    answer: str
    gold: str


@dataclass
class ComparedSide:
    """The responses of one model. `prompts` has the responses to each prompt of each set, `settings` how each set was
    answered and scored. `torn` is a file whose last line is incomplete and was left out."""

    path: Path
    origin: Literal["hpcrl", "lm-evaluation-harness"]
    model: str = ""
    step: int | None = None
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    prompts: dict[str, dict[str, list[ComparedResponse]]] = field(default_factory=dict)
    torn: Path | None = None


class FileLine(NamedTuple):
    """A line that is not empty: its number from 1, its offset in bytes, its content, and whether it has an end."""

    number: int
    offset: int
    content: bytes
    ended: bool


def lines_of(file: Path) -> Iterator[FileLine]:
    """The lines of a file that are not empty. ValueError if it cannot be read."""
    offset = 0
    try:
        with open_regular(file) as lines:
            for number, content in enumerate(lines, 1):
                if content.strip():
                    yield FileLine(number, offset, content, content.endswith(b"\n"))
                offset += len(content)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error


def object_of(line: bytes) -> dict[str, Any]:
    """The JSON object of a line, also with NaN and lone surrogates, which Python's json writes. ValueError if it is
    none."""
    try:
        found = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(found, dict):
        raise ValueError(f"{type(found).__name__}, not an object")
    return found


def line_at(response: ComparedResponse) -> dict[str, Any]:
    """The whole line of a response. ValueError if the file has changed since it was read."""
    try:
        with response.file.open("rb") as file:
            file.seek(response.offset)
            return object_of(file.readline())
    except (OSError, ValueError) as error:
        raise ValueError(f"{response.file}: it has changed since it was read: {error}") from error


def as_text(content: Any) -> str:
    """A text, or messages as text, one paragraph each with its role; a part that is not text is shown as its type."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n\n".join(_message(message) for message in content)
    return json.dumps(content, ensure_ascii=False)


def _message(message: Any) -> str:
    if not isinstance(message, dict):
        return as_text(message)
    content = message.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {"text": part} for part in content]
        content = "\n".join(str(part.get("text") or f"[{part.get('type', 'part')}]") for part in parts)
    calls = message.get("tool_calls")
    shown = [str(content or ""), *([json.dumps(calls, ensure_ascii=False)] if calls else [])]
    return f"{message.get('role', '?')}: " + "\n".join(filter(None, shown))
