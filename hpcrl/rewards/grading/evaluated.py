"""Decides whether an answer is a value, or only repeats the computation that the question asks for.

An unevaluated expression equals its value mathematically, so without this check a copy of the question would be right.
"""

from __future__ import annotations

import re

from hpcrl.rewards.grading.notation import has_variable, is_division, plain, quantity, unit_apart
from hpcrl.rewards.grading.parts import APPROXIMATELY, RELATION, is_label, outside, split

_POWER_OF_TEN = re.compile(r"[+-]?10\s*\^\s*\{?\s*[+-]?\d{1,3}\s*\}?")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_COMPUTATIONS = re.compile(
    r"\\(sum|prod|i{0,3}int|oint|lim|det|max|min|inf|sup|gcd|partial)(?![A-Za-z])"
    r"|(?<![A-Za-z\\])(lcm|gcd|max|min|det)(?![A-Za-z])|\\frac\s*\{?\s*(d)\s*\}?\s*\{?\s*d[a-z]|\\(begin)(?![A-Za-z])"
)
_OF_CONSTANTS = {
    "trigonometry": re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?(?![A-Za-z])"),
    "logarithms": re.compile(r"\\(?:log|ln|lg|exp)(?![A-Za-z])"),
    "counting": re.compile(r"\\[dt]?binom(?![A-Za-z])|!|\\choose(?![A-Za-z])|(?<![A-Za-z])[CP]\(\d+, ?\d+\)"),
    "remainders": re.compile(r"\\(?:[bp]?mod|lfloor|lceil)(?![A-Za-z])"),
}
"""In an expression with variables these may be a valid form, as in \\cos^2 x and 1 - \\sin^2 x."""


def is_evaluated(gold: str, given: str) -> bool:
    """Whether `given` is a value if `gold` is one; both in normal form. For a number, `given` must be a number;
    otherwise it must have no operation that `gold` lacks: sums, integrals, limits, determinants, and without variables
    also functions, factorials and remainders. In an equation, one side must be a value."""
    if gold == given or plain(gold) == plain(given):
        return True
    if _has_numbers_only(gold):
        return all(map(_has_numbers_only, _related(given)))
    return any(_adds_nothing(gold, side) for side in _sides(given))


def _has_numbers_only(text: str) -> bool:
    """Whether an answer is a number or a list of numbers, or an equation with such a side."""
    if _is_number(text):
        return True
    elements = split(text).elements
    if len(elements) > 1:
        return all(map(_has_numbers_only, elements))
    inner = text.removeprefix(r"\{").removesuffix(r"\}").strip()  # a set of one
    sides = _sides(inner)
    return _is_number(inner) if sides == [inner] else any(map(_has_numbers_only, sides))


def _related(text: str) -> list[str]:
    """The sides of relations, without names: 1 and 3 of 1 <= x <= 3."""
    sides = [side.strip() for side in RELATION.split(text)]
    return [side for side in sides if side and not (len(sides) > 1 and is_label(side))]


def _sides(text: str) -> list[str]:
    """The sides of an equation or approximation, without names."""
    sides = [part.strip() for side in outside(text, "=") for part in APPROXIMATELY.split(side)]
    return [side for side in sides if side and not (len(sides) > 1 and is_label(side))]


def _is_number(text: str) -> bool:
    """Whether an answer in normal form is a number in some notation, with or without a unit."""
    if is_division(text):
        return False
    if quantity(text, letter_after_number=True) is not None or _POWER_OF_TEN.fullmatch(text):
        return True
    bare, unit = unit_apart(text)
    return bool(_DECIMAL_COMMA.fullmatch(text)) or (bool(unit) and _is_number(bare.strip()))


def _adds_nothing(gold: str, given: str) -> bool:
    """Whether `given` has no operation that is not in `gold`, and no more matrices."""
    own, others = _operations(gold), _operations(given)
    if others.keys() - own.keys() or others.get("begin", 0) > own.get("begin", 0):
        return False
    return has_variable(gold) or not any(
        pattern.search(given) and not pattern.search(gold) for pattern in _OF_CONSTANTS.values()
    )


def _operations(text: str) -> dict[str, int]:
    """How often each operation occurs in an answer; all kinds of integrals count as one operation."""
    counts: dict[str, int] = {}
    for match in _COMPUTATIONS.finditer(text):
        name = next(filter(None, match.groups()))
        name = "int" if name.endswith("int") else name
        counts[name] = counts.get(name, 0) + 1
    return counts
