"""The reward for a number within a tolerance."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from hpcrl.config import RewardConfig
from hpcrl.rewards.grading.extract import final_answer, gold_answer
from hpcrl.rewards.grading.number_words import last_number_word
from hpcrl.rewards.reward import PerResponse, RewardItem, Score
from hpcrl.rewards.spec import NumericOptions
from hpcrl.spec.options import read_options

MAX_CHARS = 300
"""A longer answer is not a number."""
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?"
)
_FRACTION = re.compile(r"\d\s*/\s*\d|\\[dt]?frac")


class NumericReward(PerResponse):
    """1 if the last number of the final answer is the gold number within the tolerances, else 0. With `words`, English
    number words count in an answer without digits."""

    inline = True

    def __init__(self, config: RewardConfig):
        self.options = read_options(NumericOptions, config.options)

    def problem_of_row(self, answer: Any, extra: Mapping[str, Any]) -> str:
        """Reports an answer without a number."""
        if answer is None or self._number(gold_answer(str(answer))) is not None:
            return ""
        return f"the answer {str(answer)[:40]!r} has no number"

    def score_one(self, item: RewardItem) -> Score:
        gold = self._number(gold_answer(str(item.answer)))
        if gold is None:
            raise ValueError(f"the row's answer {str(item.answer)[:40]!r} has no number (data.answer_key)")
        given = self._number(final_answer(item.response) or "")
        options = self.options
        right = given is not None and math.isclose(given, gold, rel_tol=options.relative, abs_tol=options.absolute)
        told = None if given is None else f"{given:g}"
        no_answer = {"no_answer": float(given is None)}
        return Score(float(right), float(right), metrics=no_answer, extracted=told, ground_truth=f"{gold:g}")

    def _number(self, text: str) -> float | None:
        by_word = self.options.words and not re.search(r"\d", text)
        return last_number_word(text[-MAX_CHARS:]) if by_word else last_number(text)


def last_number(text: str) -> float | None:
    """The last number in a text, with thousands separators or an exponent. None without a finite number, or if the text
    has a fraction, which only the reward math supports."""
    text = text[-MAX_CHARS:]
    found = [] if _FRACTION.search(text) else _NUMBER.findall(text)
    number = float(found[-1].replace(",", "").replace("\u2212", "-")) if found else math.nan
    return number if math.isfinite(number) else None
