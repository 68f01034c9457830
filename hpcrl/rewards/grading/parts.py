"""The parts of an answer in normal form: elements of lists, sides of equations."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpcrl.rewards.grading.notation import plain

RELATION = re.compile(r"\\(?:le|ge|ne|in|notin|subset|equiv)(?![A-Za-z])|[<>]")
APPROXIMATELY = re.compile(r"\\(?:approx|simeq|sim)(?![A-Za-z])")
_OPEN, _CLOSE = "([{", ")]}"
_NOT_IN_LABELS = re.compile(r"[\d+^!]|-|\\(?:sqrt|sin|cos|tan|log|ln|exp|int|sum|prod|lim|pi|infty)(?![A-Za-z])")
_INDEX = re.compile(r"_(?:\{[^{}]*\}|\w)|\^\{-1\}|(?<=[A-Za-z])\s*\([^()]*\)")
_AND = re.compile(r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """The elements between the outer brackets of an answer; one element and no brackets if it is not a list."""

    brackets: str
    elements: tuple[str, ...]

    @property
    def ordered(self) -> bool:
        return self.brackets not in ("", "{}")


def split(text: str) -> AnswerParts:
    elements = _elements(text)
    if len(elements) == 1:
        start, end = (2, -2) if text.startswith(r"\{") and text.endswith(r"\}") else (1, -1)
        inner, brackets = text[start:end], text[start - 1 : start] + text[-1:]
        if len(inner) > 2 and brackets[0] in _OPEN and brackets[1] in _CLOSE and len(outside(inner)) > 1:
            elements = _elements(inner)
            return AnswerParts(brackets, elements if brackets != "{}" else _once(elements))
    return AnswerParts("", _once(elements))


def _elements(text: str) -> tuple[str, ...]:
    """The parts between commas, semicolons, "and" and "or" outside brackets; a part with one "\\pm" counts as two."""
    found: list[str] = []
    for part in outside(_AND.sub(" , ", text)):
        signed = [part.replace(r"\pm", sign) for sign in "+-"] if part.count(r"\pm") == 1 else [part]
        found += [element.strip() for element in signed if element.strip()]
    return tuple(found)


def _once(elements: tuple[str, ...]) -> tuple[str, ...]:
    return tuple({plain(element): element for element in elements}.values())


def outside(text: str, separators: str = ",;") -> list[str]:
    """The parts of `text` between separators outside all brackets; only `text` if brackets do not match."""
    parts, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char in _OPEN) - (char in _CLOSE)
        if depth < 0:
            return [text]
        if depth == 0 and char in separators:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def is_label(text: str) -> bool:
    """Whether a side of an equation is a name that gets a value: x, x_1, f(2), \\angle ABC, (p, q), total cost."""
    if text in ("e", "i") or not re.search("[A-Za-z]", text):
        return False
    return not _NOT_IN_LABELS.search(_INDEX.sub("", text))


def depths(text: str) -> tuple[int, int]:
    """The greatest depth of brackets, and the depth at the end, -1 if a closing bracket was never opened."""
    depth = deepest = lowest = 0
    for char in text:
        depth += (char in _OPEN) - (char in _CLOSE)
        deepest, lowest = max(deepest, depth), min(lowest, depth)
    return deepest, depth if lowest == 0 else -1
