"""The parts of a response a reward looks at: what follows the thinking, boxes, marked answers."""

from __future__ import annotations

import re

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")


def after_thinking(response: str) -> str:
    """The text after the last `</think>`; empty while a `<think>` is still open; all of it without thinking."""
    _, closed, rest = response.rpartition(THINK_CLOSE)
    if THINK_OPEN in rest:
        return rest[: rest.index(THINK_OPEN)] if closed else ""
    return rest


def last_boxed(text: str) -> str | None:
    """Content of the last complete `\\boxed{...}` (braces balanced) or `\\boxed x`; None without one."""
    for match in reversed(list(_BOX.finditer(text))):
        start = match.end()
        if start >= len(text):
            continue
        if text[start] != "{":
            return re.split(r"[\s$.,;]", text[start:], maxsplit=1)[0]
        end = _closing_brace(text, start)
        if end is not None:
            return text[start + 1 : end].strip()
    return None


def _closing_brace(text: str, start: int) -> int | None:
    depth = 0
    for i in range(start, len(text)):
        if text[i] in "{}" and (i == 0 or text[i - 1] != "\\"):
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return i
    return None


def after_marker(text: str, marker: str) -> str | None:
    """The rest of the line after the last `marker` (GSM8K's "####"); None without one."""
    _, found, rest = text.rpartition(marker)
    return rest.split("\n", 1)[0].strip() if found else None
