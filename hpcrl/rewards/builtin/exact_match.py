"""Exact match of normalised text."""

from __future__ import annotations

import json
import re
import unicodedata

from hpcrl.config import RewardConfig
from hpcrl.rewards.grading.extract import after_thinking
from hpcrl.rewards.reward import PerResponse, RewardItem, Score, required_answer
from hpcrl.rewards.spec import ExactMatchOptions
from hpcrl.spec.options import read_options


class ExactMatchReward(PerResponse):
    """1 if the response equals the answer, or one answer of a list, else 0. Both are compared after NFKC, with white
    space collapsed, without a final full stop and, by default, case-insensitively."""

    def __init__(self, config: RewardConfig):
        self.options = read_options(ExactMatchOptions, config.options)
        self._pattern = re.compile(self.options.pattern) if self.options.pattern else None
        self.inline = self._pattern is None  # a user's pattern may backtrack endlessly

    def score_one(self, item: RewardItem) -> Score:
        answers, given = answers_of(item), after_thinking(item.response)
        if self._pattern:
            matches = list(self._pattern.finditer(given))
            if not matches:
                return Score(0.0, 0.0)
            given = matches[-1].group(1 if self._pattern.groups else 0) or ""
        hit = float(self._normalise(given) in {self._normalise(answer) for answer in answers})
        return Score(hit, hit, extracted=given, ground_truth=" or ".join(answers))

    def _normalise(self, text: str) -> str:
        text = " ".join(unicodedata.normalize("NFKC", text).split()).removesuffix(".")
        return text.casefold() if self.options.ignore_case else text


def answers_of(item: RewardItem) -> list[str]:
    """The answer of the item's row, or each of a list of answers. ValueError without one."""
    answer = required_answer(item)
    return [as_text(one) for one in (answer if isinstance(answer, list) else [answer])]


def as_text(answer: object) -> str:
    """An answer as text: strings unchanged, other JSON values as JSON."""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
