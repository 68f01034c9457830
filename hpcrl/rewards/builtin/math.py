"""The maths reward: compares a response's final answer with the gold answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hpcrl.config import RewardConfig
from hpcrl.rewards.builtin.exact_match import as_text
from hpcrl.rewards.grading.equality import equivalent
from hpcrl.rewards.grading.extract import final_answer, gold_answer
from hpcrl.rewards.grading.notation import flaw_of
from hpcrl.rewards.reward import PerResponse, RewardItem, Score, required_answer
from hpcrl.rewards.spec import MathOptions
from hpcrl.spec.options import read_options


class MathReward(PerResponse):
    """1 if the final answer equals the gold answer, else 0 (docs/rewards.md). Exceeding the time limit is an error."""

    def __init__(self, config: RewardConfig):
        self.options = read_options(MathOptions, config.options)
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # logs a line per unreadable answer otherwise

    def problem_of_row(self, answer: Any, extra: Mapping[str, Any]) -> str:
        """Reports a gold answer that is empty, too long or incomplete LaTeX: no time limit covers normalising it."""
        text = "" if answer is None else as_text(answer)
        return self._problem_of(gold_answer(text)) if text.strip() else ""

    def _problem_of(self, gold: str) -> str:
        if not gold:
            return 'the gold answer is empty: nothing follows its last "####", or nothing is in its last box'
        most = self.options.max_answer_chars
        if len(gold) <= most:
            flaw = flaw_of(gold)
            return f"the gold answer {gold[-60:]!r} cannot be read: {flaw}" if flaw else ""
        return (
            f"the gold answer {gold[:20]!r}... has {len(gold)} characters, but at most {most} are compared "
            "(reward.*.options.max_answer_chars)"
        )

    def score_one(self, item: RewardItem) -> Score:
        gold = gold_answer(as_text(required_answer(item)))
        if problem := self._problem_of(gold):
            raise ValueError(problem)
        given = final_answer(item.response, self.options.require_boxed)
        if not given or len(given) > self.options.max_answer_chars:
            return Score(0.0, 0.0, metrics={"no_answer": 1.0}, extracted=given, ground_truth=gold)
        try:
            right = float(equivalent(gold, given, self.options.unevaluated))
        except TimeoutError as error:
            return Score(0.0, 0.0, f"TimeoutError: {error}", extracted=given, ground_truth=gold)
        return Score(right, right, extracted=given, ground_truth=gold)
