"""The multiple-choice reward: compares a response's option letter with the row's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hpcrl.config import RewardConfig
from hpcrl.rewards.grading.extract import after_thinking, boxed_answer, final_answer
from hpcrl.rewards.reward import PerResponse, RewardItem, Score
from hpcrl.rewards.spec import ChoiceOptions
from hpcrl.spec.options import read_options

_LETTER = re.compile(r"\\(?:text|math)(?:bf|rm|it|sf)?\s*\{([^{}]*)\}")
_OPTION = re.compile(r"(?:[Oo]ption\s+)?(?:[(\[]\s*([A-Za-z])\s*[)\]]|([A-Z])(?=\s*(?:[).,:\]\u2013-]|because\b|$)))")
RIGHT_BOXED, RIGHT, WRONG_BOXED, WRONG = 1.0, 0.5, -0.5, -1.0


class ChoiceReward(PerResponse):
    """1 for the right letter, else 0. With `soft`, ROLL's rewards for answers across domains (arXiv 2506.06122): 1 for
    a right and -0.5 for a wrong letter in a box, else 0.5 and -1. The score is 1 for the right letter."""

    inline = True

    def __init__(self, config: RewardConfig):
        self.options = read_options(ChoiceOptions, config.options)

    def problem_of_row(self, answer: Any, extra: Mapping[str, Any]) -> str:
        """Reports an answer that is not the letter of an option."""
        if answer is None or letter_of(str(answer)) is not None:
            return ""
        return f"the answer {str(answer)[:40]!r} is not an option, such as A or (B)"

    def score_one(self, item: RewardItem) -> Score:
        gold = letter_of(str(item.answer))
        if gold is None:
            raise ValueError(f"the row's answer {str(item.answer)[:40]!r} is not an option letter (data.answer_key)")
        boxed = boxed_answer(after_thinking(item.response))
        given = letter_of(final_answer(item.response) or "")
        right = given == gold
        if self.options.soft:
            in_box = boxed is not None
            reward = (RIGHT_BOXED if in_box else RIGHT) if right else (WRONG_BOXED if in_box else WRONG)
        else:
            reward = float(right)
        return Score(
            reward, float(right), metrics={"no_answer": float(given is None)}, extracted=given, ground_truth=gold
        )


def letter_of(answer: str) -> str | None:
    """The option letter at the start of an answer: "B", "(b)", "B. Paris", "option B"; None without one."""
    match = _OPTION.match(_LETTER.sub(r"\1", answer).strip().strip("$*`").strip())
    return (match[1] or match[2]).upper() if match else None
