"""The built-in rewards: their options, and where each is."""

from __future__ import annotations

import re

from pydantic import field_validator

from hpcrl.spec.fields import NonNegative, Positive, Section, Share
from hpcrl.spec.kinds import RewardSpec


class ExactMatchOptions(Section):
    """Options of the reward exact_match."""

    pattern: str | None = None
    """Regular expression whose last match (its first group, if it has one) is the answer; null: everything after the
    thinking."""
    ignore_case: bool = True
    """Compare without regard to case."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return pattern


class MathOptions(Section):
    """Options of the reward math."""

    require_boxed: bool = False
    """Only a box counts as the answer."""
    max_answer_chars: Positive = 300
    """A longer answer is wrong."""


class ReasoningGymOptions(Section):
    """Options of the reward reasoning_gym."""

    threshold: Share | None = None
    """Reward 1 from this score on, else 0; null: the reward is the score with its partial credit."""


class SortDigitsOptions(Section):
    """Options of the reward sort_digits."""

    partial: Share = 0.0
    """The largest reward a wrong line can get, for the share of digits in their places."""


class FakeOptions(Section):
    """Options of the reward fake."""

    pass_rate: Share = 0.5
    """Share of responses with reward 1."""
    latency_s: NonNegative = 0.0
    """Seconds that scoring one response takes."""


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
