"""Decides whether two answers are mathematically equal: text, numbers and list elements first, then math-verify.

math-verify multiplies the letters of words, takes the last side of a chain of equations, mistakes factors for units,
merges tuples with numbers and may never return. The steps before it and the time limit prevent this.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeVar

from hpcrl.rewards.grading.evaluated import is_evaluated
from hpcrl.rewards.grading.notation import (
    UNIT_MARK,
    close,
    has_other_words,
    has_variable,
    is_surely_unit,
    measures_differ,
    names,
    normalise,
    plain,
    quantity,
    unit_apart,
)
from hpcrl.rewards.grading.parts import APPROXIMATELY, RELATION, AnswerParts, depths, is_label, outside, split

T = TypeVar("T")
LIMIT_S = 2.0  # CPU time of one comparison; the pool's timeout ends code that signals cannot interrupt
MAX_DEPTH = 20
MAX_ELEMENTS = 20  # of lists compared element by element
_EXPLOSIVE = re.compile(
    r"\^\{?\s*-?\d{5}|\d\s*\}?\s*\^\s*\{*\s*\d+\s*\}*\^|\d{4,}\s*\)*!|!\s*\)*!"
    r"|[A-Za-z][^()]*\)\s*\^\s*\{?\s*\d{3}"  # a sum to a power of hundreds, which sympy expands
)
_CHOICE = re.compile(r"\(?([A-Z])[).:]?")
_CHOICE_WITH_TEXT = re.compile(r"(?:\(([A-Z])\)|([A-Z])[).:])\s*(\S.*)")
_NEXT_CHOICE = re.compile(r"\([A-Z]\)|(?<![A-Za-z\d(])[A-Z]\)|(?:or|and|,|;|/|&)\s*\(?[A-Z](?![A-Za-z])")
_EXCLUSION = re.compile(r"\\(?:ne|notin|to|rightarrow|Rightarrow|implies|iff|mapsto)(?![A-Za-z])|->|=>")
_MALFORMED = re.compile(
    r"(?<![_^\d.])[\d.]+\s+[\d.]"  # two numbers
    r"|(?<![A-Za-z\d}_])\d+\s*_"  # a number in some base
    r"|\.\.|[?]|\\not(?![A-Za-z])|[+-]\s*-|\d\s*'|\d\s*\|\s*\d|(?:[-+*/=^_<>:]|\\cdot|\\times|\\pm)\s*(?:$|[!%)\]}|,*/=])"
)
_TUPLE = re.compile(r"(?<![A-Za-z])[(\[][^()\[\]]*,[^()\[\]]*[)\]]")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


def equivalent(gold: str, given: str, unevaluated: bool = False) -> bool:
    """Whether two answers are equal. With `unevaluated`, an unevaluated expression may equal its value. TimeoutError
    after LIMIT_S of CPU time. Main thread only, since the limit uses a signal."""
    other_measure = measures_differ(gold, given)
    gold, given = _normalise_gold(gold), normalise(given)
    if not given or not gold or other_measure or not (unevaluated or is_evaluated(gold, given)):
        return False
    at_sight = _equal_at_sight(gold, given)
    if at_sight is not None:
        return at_sight
    _load_math_verify()
    return within_limit(lambda: _equal(gold, given))


def is_explosive(text: str) -> bool:
    """Whether evaluating `text` could take forever: power towers, huge factorials and exponents, deep nesting."""
    return depths(text)[0] > MAX_DEPTH or bool(_EXPLOSIVE.search(text))


def _equal(gold: str, given: str) -> bool:
    """Equality of answers in normal form."""
    for decide in (_equal_at_sight, _choices_equal):
        if (decided := decide(gold, given)) is not None:
            return decided
    if is_explosive(gold) or is_explosive(given):
        return False
    if _is_malformed(gold) or _is_malformed(given):
        return plain(gold).casefold() == plain(given).casefold()
    if APPROXIMATELY.search(given) and not APPROXIMATELY.search(gold):
        left, right = (part.strip() for part in APPROXIMATELY.split(given, maxsplit=1))
        return bool(right) and _equal(gold, right if not left or is_label(left) else left)
    if _with_decimal_point(gold, given) or _with_decimal_point(given, gold):
        return True
    for decide in (_parts_equal, _sides_equal, _units_equal, _words_equal):
        if (decided := decide(gold, given)) is not None:
            return decided
    return not _misread(gold, given) and _verify(gold, given)


def _equal_at_sight(gold: str, given: str) -> bool | None:
    """Equality as text or as numbers; None if neither comparison decides."""
    if gold == given or plain(gold) == plain(given) != "":
        return True
    a = quantity(gold)
    b = quantity(given, letter_after_number=True) if a is not None else None
    return None if a is None or b is None else a.equals(b)


def _is_malformed(text: str) -> bool:
    """Whether math-verify would parse a part of `text` and ignore the rest."""
    if not text.isascii() or depths(text)[1] != 0 or _MALFORMED.search(text):
        return True
    return "\\\\" in text and "\\begin" not in text


def _choices_equal(gold: str, given: str) -> bool | None:
    """Whether the letters of two choices, "B", "(B)" or "(B) 42", are the same; None if either is not a choice."""
    for one, other in ((gold, given), (given, gold)):
        letter, choice = _CHOICE.fullmatch(one), _CHOICE.fullmatch(other) or _CHOICE_WITH_TEXT.fullmatch(other)
        if letter and choice:
            several = choice.re is _CHOICE_WITH_TEXT and _NEXT_CHOICE.search(choice[3])
            return not several and letter[1] in choice.groups()[:2]
    return None


def _with_decimal_point(text: str, other: str) -> bool:
    """Whether `text` is the number `other` with a decimal comma."""
    number = quantity(other) if _DECIMAL_COMMA.fullmatch(text) else None
    return number is not None and close(Fraction(text.replace(",", ".")), number.value)


# -- lists, sets, tuples, intervals


def _parts_equal(gold: str, given: str) -> bool | None:
    """Equality element by element; None if neither is a list, or if math-verify should decide."""
    a, b = split(gold), split(given)
    counts = len(a.elements), len(b.elements)
    if max(counts) == 1 or max(counts) > MAX_ELEMENTS:
        return None
    if min(counts) == 1:
        single = gold if counts[0] == 1 else given
        return False if quantity(single) is not None else None
    if a.ordered != b.ordered:
        return None
    if counts[0] != counts[1] or (a.ordered and a.brackets != b.brackets and counts[0] == 2):
        return False
    in_order = a.ordered or (len(_assigned(a)) > 1) != (len(_assigned(b)) > 1)  # "x=1, y=2" against "1, 2"
    if in_order:
        return all(map(_equal, a.elements, b.elements))
    return _matched(list(a.elements), list(b.elements))


def _matched(golds: list[str], givens: list[str]) -> bool:
    """Whether each element has an equal element on the other side, in any order."""
    for equal in (_equal_at_sight, _equal):  # the slow test gets the elements that the fast test leaves
        for gold in list(golds):
            found = next((given for given in givens if equal(gold, given)), None)
            if found is not None:
                golds.remove(gold)
                givens.remove(found)
            elif equal is _equal:
                return False
    return True


def _assigned(parts: AnswerParts) -> set[str]:
    """The names to which elements assign values."""
    return {plain(element.partition("=")[0]) for element in parts.elements if "=" in element}


# -- equations, words


def _sides_equal(gold: str, given: str) -> bool | None:
    """Equality if one answer is an equation, "x = 5" or "6*7 = 42": every side that is not a name must be equal. None
    without an equation, and for two equations that are not assignments."""
    a, b = outside(gold, "="), outside(given, "=")
    if max(len(a), len(b)) == 1 or RELATION.search(gold) or RELATION.search(given):
        return None
    (name, golds), (given_name, givens) = _assignment(a), _assignment(b)
    if len(a) > 1 and len(b) > 1:
        if not (name and given_name):
            return None
        is_function = "(" in name or "(" in given_name  # y = 2x and f(x) = 2x
        if plain(name) != plain(given_name) and not is_function:
            return False
    elif len(a) > 1 and not name:
        return False
    return bool(givens) and all(_equal(golds[-1], side) for side in givens)


def _assignment(sides: list[str]) -> tuple[str, list[str]]:
    """(label, values) of an equation's sides; an empty label and all sides if neither the first nor the last is one."""
    sides = [side.strip() for side in sides if side.strip()]
    if len(sides) > 1 and is_label(sides[0]):
        return sides[0], [side for side in sides[1:-1] if not is_label(side)] + sides[-1:]
    if len(sides) == 2 and is_label(sides[1]):
        return sides[1], sides[:1]
    return "", sides


def _units_equal(gold: str, given: str) -> bool | None:
    """Equality of the expressions before the units, if at most one unit is missing; None without units, and if the
    letters of unequal answers may be variables."""
    (bare_gold, gold_unit), (bare_given, given_unit) = unit_apart(gold), unit_apart(given)
    if not (gold_unit or given_unit):
        return None
    if (gold_unit == given_unit or not (gold_unit and given_unit)) and _equal(bare_gold, bare_given):
        return True
    return False if is_surely_unit(gold) or is_surely_unit(given) else None


def _words_equal(gold: str, given: str) -> bool | None:
    """Equality of answers with words, as text and without case; None without words."""
    if has_other_words(gold) or has_other_words(given):
        return plain(gold).casefold() == plain(given).casefold()
    return None


def _misread(gold: str, given: str) -> bool:
    """Whether math-verify would misread one of the answers, or expand an expression to compare it with a number."""
    if names(gold) != names(given):
        return True
    for text, other in ((gold, given), (given, gold)):
        number = quantity(text)
        if RELATION.match(text) or (number is not None and _TUPLE.search(other)):
            return True
        if number is not None and not number.unit and has_variable(other):
            return True
    return bool(_EXCLUSION.search(gold)) != bool(_EXCLUSION.search(given))


# -- math-verify within its limit


class _TooLong(BaseException):
    """Not an Exception, since libraries catch exceptions and continue."""


def within_limit(action: Callable[[], T]) -> T:
    """The result of `action`. TimeoutError after LIMIT_S of CPU time, which makes scores independent of machine load.

    The alarm repeats, since sympy sometimes catches it and continues; a result after the alarm is discarded.
    """
    armed, rung = True, False

    def ring(number: int, frame: object) -> None:
        nonlocal rung
        if armed:
            rung = True
            raise _TooLong

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S, LIMIT_S / 3)
    try:
        result = action()
        armed = False
    except _TooLong:
        rung = True
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    if rung:
        from sympy.core.cache import clear_cache

        clear_cache()  # may hold interrupted results
        raise TimeoutError(f"comparing the response with the answer takes more than {LIMIT_S:g} s of CPU time")
    return result


@lru_cache(maxsize=1)
def _load_math_verify() -> None:
    """Import sympy before the alarm is set: the import takes seconds of CPU time, and an alarm during it would leave a
    half-imported module. Runs a comparison, since sympy imports some of its modules on first use."""
    _verify("x", "2x")


def _verify(gold: str, given: str) -> bool:
    from math_verify import verify

    golds, givens = list(_parse_gold(gold)), _parse(given)
    return bool(givens) and verify(golds, givens, allow_set_relation_comp=True, timeout_seconds=None)


def _parse(text: str) -> list[Any]:
    from math_verify import ExprExtractionConfig, parse  # imports sympy

    found: list[Any] = parse(f"${_spaced(text)}$", [_latex(), ExprExtractionConfig()], parsing_timeout=None)
    return found


@lru_cache(maxsize=1)
def _latex() -> Any:
    """math-verify's LaTeX configuration without units: with them, it reads 2ab as 2, and c, d, g, t as units."""
    from math_verify import LatexExtractionConfig

    usual = LatexExtractionConfig()
    return replace(usual, normalization_config=replace(usual.normalization_config, units=False))


def _spaced(text: str) -> str:
    return re.sub(r",(?=\d)", ", ", text.replace(UNIT_MARK, " "))  # else math-verify reads (12,102) as 12102


_normalise_gold = lru_cache(maxsize=4096)(normalise)  # group members share their gold answer


@lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> tuple[Any, ...]:
    return tuple(_parse(gold))
