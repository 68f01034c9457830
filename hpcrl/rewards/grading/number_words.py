"""English number words, as in answers to counting questions."""

from __future__ import annotations

import re

_UNITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEENS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
_SINGLE = (*_UNITS, *_TEENS)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_WORD = re.compile(
    rf"\b(?:({'|'.join(_TENS)})(?:[\s-]({'|'.join(_UNITS[1:])}))?|({'|'.join(_SINGLE)}))\b", re.IGNORECASE
)
_OTHER = re.compile(r"\b(?:hundred|thousand|million|billion|dozen|half|halves|third|quarter)s?\b", re.IGNORECASE)


def last_number_word(text: str) -> float | None:
    """The last number word of a text, from zero to ninety-nine. None without one, or if the text has a word of a larger
    number or of a fraction."""
    found = [] if _OTHER.search(text) else _WORD.findall(text)
    if not found:
        return None
    tens, unit, single = (word.lower() for word in found[-1])
    if single:
        return float(_SINGLE.index(single))
    return 10.0 * (_TENS.index(tens) + 2) + (_UNITS.index(unit) if unit else 0)
