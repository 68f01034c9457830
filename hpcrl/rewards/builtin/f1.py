"""The reward of short text answers: the F1 of the words that response and gold answer share."""

from __future__ import annotations

import re
import string
from collections import Counter

from hpcrl.config import RewardConfig
from hpcrl.rewards.builtin.exact_match import answers_of
from hpcrl.rewards.grading.extract import final_answer
from hpcrl.rewards.reward import PerResponse, RewardItem, Score
from hpcrl.rewards.spec import F1Options
from hpcrl.spec.options import read_options

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class F1Reward(PerResponse):
    """The word F1 of the final answer, as in SQuAD (arXiv 1606.05250): case-insensitive, without punctuation and
    English articles; the best of several gold answers counts. The score is 1 if the F1 is at least `threshold`."""

    def __init__(self, config: RewardConfig):
        self.options = read_options(F1Options, config.options)

    def score_one(self, item: RewardItem) -> Score:
        answers = answers_of(item)
        given = final_answer(item.response) or ""
        best = max(f1(given, answer) for answer in answers)
        return Score(best, float(best >= self.options.threshold), extracted=given, ground_truth=" or ".join(answers))


def f1(given: str, gold: str) -> float:
    """The F1 of two texts, from 0 to 1; 1 if neither has words."""
    one, other = _words(given), _words(gold)
    if not one or not other:
        return float(one == other)
    shared = (Counter(one) & Counter(other)).total()
    return 2 * shared / (len(one) + len(other))


def _words(text: str) -> list[str]:
    return _ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split()
