"""The maths rule: the final answer of a response against the gold answer, with math-verify behind exact comparisons.

math-verify pools all boxes, multiplies the letters of words, and can be kept busy for ever; hence the steps before it.
"""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeVar

from hpcrl.config import Positive, RewardConfig, Section
from hpcrl.rewards.base import RewardItem, Score
from hpcrl.rewards.exact_match import as_text
from hpcrl.rewards.extract import after_marker, after_thinking, last_boxed
from hpcrl.spec.options import read_options

T = TypeVar("T")
SOFT_LIMIT_S = 1.0  # of each parse and comparison, by signal; the pool's timeout kills what no signal reaches
_ANSWER_IS = re.compile(r"answer\s*(?:is|[:=])\s*[:=]?\s*((?:(?!answer\s*(?:is|[:=])).)+)", re.IGNORECASE)
_MARKUP = re.compile(r"\\left|\\right|\\[!,;:> ]|\\displaystyle|\^\{?\\circ\}?|\\?[$%]|[\s~]")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_THOUSANDS = re.compile(r"(?<![\d.])(\d{1,3})((?:(?:,|\{,\}|\\,| )\d{3})+)(?!\d)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\{?(\d+)\}?")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?")
_WITH_UNIT = re.compile(rf"({_NUMBER.pattern})((?:\s+[a-z]{{2,}})+)\.?", re.IGNORECASE)
_MULTIPLIER = re.compile(
    r"\b(?:hundred|thousand|[mb]illion|trillion|dozen|half|halves|thirds?|quarters?|percent|or|and)\b"
)
_CHOICE = re.compile(r"\(([A-Za-z])\)")
_WORD = re.compile(r"[^\W\d_]{4,}")
_EXPLOSIVE = re.compile(r"\^\{?\s*-?\d{5}|\d\s*\}?\s*\^\s*\{*\s*\d+\s*\}*\^|\d{4,}\s*\)*!|!\s*\)*!")
MAX_DEPTH = 20


class Options(Section):
    """`require_boxed`: only a box counts as the answer. `max_answer_chars`: a longer answer is wrong."""

    require_boxed: bool = False
    max_answer_chars: Positive = 300


class MathReward:
    """1 where the final answer equals the gold answer, else 0.

    The final answer is the last box after the thinking; without one what follows the last "####", then the last
    "answer is", then the last line. Of the gold answer: what follows "####", or its last box, or all of it.
    """

    batched = False
    inline = False

    def __init__(self, config: RewardConfig):
        self.options = read_options(Options, config.options)
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # one line of log per answer that timed out

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        return [self._score(item) for item in items]

    def _score(self, item: RewardItem) -> Score:
        if item.answer is None:
            raise ValueError("the row has no answer to compare with (data.answer_key)")
        given = final_answer(item.response, self.options.require_boxed)
        if not given or len(given) > self.options.max_answer_chars:
            return Score(0.0, 0.0, metrics={"no_answer": 1.0})
        right = float(equivalent(gold_answer(as_text(item.answer)), given))
        return Score(right, right)


def gold_answer(answer: str) -> str:
    """The final part of a gold answer or solution."""
    return after_marker(answer, "####") or last_boxed(answer) or answer.strip()


def final_answer(response: str, require_boxed: bool = False) -> str | None:
    """The final answer a response gives; None without one."""
    text = after_thinking(response)
    boxed = last_boxed(text)
    if boxed is not None or require_boxed:
        return boxed
    marked = after_marker(text, "####")
    if marked is not None:
        return marked
    stated = _ANSWER_IS.findall(text)
    if stated:
        return stated[-1].strip()
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None


def equivalent(gold: str, given: str) -> bool:
    """Whether two answers are mathematically equal. Uses SIGALRM: main thread only."""
    gold, given = _rewrite(gold), _rewrite(given)
    if plain(gold) == plain(given) != "":
        return True
    a, b = _number(gold), _number(given)
    if a is not None and b is None:
        b = _number_of_things(given)
    if a is not None and b is not None:
        return abs(a - b) <= Decimal("1e-6") * min(abs(a), abs(b), Decimal(1))
    if _is_word(gold) or _is_word(given):  # math-verify multiplies letters: "listen" would equal "silent"
        return plain(gold).casefold() == plain(given).casefold()
    if is_explosive(gold) or is_explosive(given):
        return False
    return _verify(gold, given)


def is_explosive(text: str) -> bool:
    """Whether evaluating `text` could take for ever: towers of powers, huge factorials and exponents, deep nesting."""
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest > MAX_DEPTH or bool(_EXPLOSIVE.search(text))


def plain(text: str) -> str:
    """Normal form for comparison as text: without spaces, markup, units of degree and percent, final full stop."""
    text = _MARKUP.sub("", _TEXT.sub(r"\1", text)).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = text.rstrip(".")
    choice = _CHOICE.fullmatch(text)
    return choice[1] if choice else text


def _rewrite(text: str) -> str:
    """The same answer without currency signs, separators of thousands and repeating decimals."""
    text = text.strip().replace("\\$", "").replace("$", "").replace("−", "-")
    text = _THOUSANDS.sub(lambda m: m[1] + re.sub(r"\D", "", m[2]), text)
    return _REPEATING.sub(_fraction, text)


def _fraction(match: re.Match[str]) -> str:
    whole, fixed, repeated = match.groups()
    tail = Fraction(int(repeated), 10 ** len(fixed) * (10 ** len(repeated) - 1))
    value = Fraction(int(whole + fixed or "0"), 10 ** len(fixed)) + tail
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _number(text: str) -> Decimal | None:
    text = text.strip().rstrip(".")
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


def _number_of_things(text: str) -> Decimal | None:
    """72 of "72 clips"; None where the words change the number ("3 million")."""
    match = _WITH_UNIT.fullmatch(text.strip())
    return _number(match[1]) if match and not _MULTIPLIER.search(match[2].lower()) else None


def _is_word(text: str) -> bool:
    return bool(
        _WORD.fullmatch(text.strip()) or (_TEXT.fullmatch(text.strip()) and re.search(r"[^\W\d_]", plain(text)))
    )


class _TooLong(BaseException):
    """No Exception: libraries catch those and go on."""


def _within_limit(action: Callable[[], T], otherwise: T) -> T:
    """What `action` returns within SOFT_LIMIT_S, else `otherwise`.

    math-verify's own limit is a single alarm: where sympy catches it, which it does in places, it computes on for ever.
    This one rings again.
    """

    def ring(number: int, frame: object) -> None:
        raise _TooLong

    since, (left_s, every_s) = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, SOFT_LIMIT_S, SOFT_LIMIT_S)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        return action()
    except _TooLong:
        return otherwise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left_s:  # somebody else's alarm goes on
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, left_s - (time.monotonic() - since)), every_s)


def _verify(gold: str, given: str) -> bool:
    from math_verify import verify

    if not (parsed := _parse(given)):
        return False
    golds = list(_parse_gold(gold))
    return _within_limit(lambda: verify(golds, parsed, allow_set_relation_comp=True, timeout_seconds=None), False)


def _parse(text: str) -> list[Any]:
    from math_verify import parse  # pulls in sympy

    return _within_limit(lambda: parse(f"${text}$", parsing_timeout=None), [])


@lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> tuple[Any, ...]:
    return tuple(_parse(gold))
