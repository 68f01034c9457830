"""The built-in rewards: their options, and where each is."""

from __future__ import annotations

import re

from pydantic import field_validator

from hpcrl.spec.fields import NonNegative, Positive, Section, Share
from hpcrl.spec.kinds import RewardSpec


class ExactMatchOptions(Section):
    """`pattern`: its last match (the first group, if it has one) is the answer; null: everything after the thinking."""

    pattern: str | None = None
    ignore_case: bool = True

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return pattern


class MathOptions(Section):
    """`require_boxed`: only a box counts as the answer. `max_answer_chars`: a longer answer is wrong."""

    require_boxed: bool = False
    max_answer_chars: Positive = 300


class ReasoningGymOptions(Section):
    """`threshold`: reward 1 from this score on, else 0; null: the reward is the score with its partial credit."""

    threshold: Share | None = None


class SortDigitsOptions(Section):
    """`partial`: the largest reward a wrong line can get, for the share of digits in their places."""

    partial: Share = 0.0


class FakeOptions(Section):
    """`pass_rate`: share of responses with reward 1. `latency_s`: seconds that scoring one takes."""

    pass_rate: Share = 0.5
    latency_s: NonNegative = 0.0


EXACT_MATCH = RewardSpec(
    about="The answer, after white space, case and a final full stop are evened out.",
    make="hpcrl.rewards.exact_match:ExactMatch",
    section=ExactMatchOptions,
    compares_answer=True,
)

MATH = RewardSpec(
    about="The final answer of a response against the gold answer, as mathematics.",
    make="hpcrl.rewards.math:MathReward",
    section=MathOptions,
    compares_answer=True,
)

REASONING_GYM = RewardSpec(
    about="reasoning-gym's own verifiers.",
    make="hpcrl.rewards.reasoning_gym:ReasoningGym",
    section=ReasoningGymOptions,
    compares_answer=True,
)

SORT_DIGITS = RewardSpec(
    about="The reward of the built-in task sort_digits.",
    make="hpcrl.rewards.sort_digits:SortDigits",
    section=SortDigitsOptions,
    compares_answer=True,
)

FAKE = RewardSpec(
    about="A reward by lot, for trials of what drives rewards.",
    make="hpcrl.rewards.fake:FakeReward",
    section=FakeOptions,
)

FUNCTION = RewardSpec(
    about="A function of yours, called as verl, TRL, OpenRLHF or hpcrl would.",
    make="hpcrl.rewards.function:FunctionReward",
    imports_code="function",
    scores_in_unit_interval=False,
)
