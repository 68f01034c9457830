"""The specifications of the built-in rewards, with their options."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, field_validator

from hpcrl.spec.fields import NUMBER, NonNegative, Section, Share
from hpcrl.spec.kinds import RewardSpec


class ExactMatchOptions(Section):
    """Options of the reward exact_match."""

    pattern: str | None = None
    """Regular expression whose last match (its first group, if any) is the answer; null: everything after the
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
    """Accept only a box as the answer."""
    max_answer_chars: Annotated[int, Field(ge=1, le=4000), NUMBER] = 300
    """Maximum answer length, characters; a longer answer is wrong, a longer gold answer an error."""


class ReasoningGymOptions(Section):
    """Options of the reward reasoning_gym."""

    threshold: Share | None = None
    """Reward 1 from this score on, else 0; null: the reward is the score with partial credit."""


class SortDigitsOptions(Section):
    """Options of the reward sort_digits."""

    partial: Share = 0.0
    """Maximum reward of a wrong answer, scaled by the share of digits in the right place."""


class FakeOptions(Section):
    """Options of the reward fake."""

    pass_rate: Share = 0.5
    """Share of responses with reward 1."""
    latency_s: NonNegative = 0.0
    """Seconds to score one response."""


EXACT_MATCH = RewardSpec(
    about="Compares the answer with the gold answer, ignoring white space, case and a final full stop.",
    make="hpcrl.rewards.exact_match:ExactMatch",
    section=ExactMatchOptions,
    compares_answer=True,
)

MATH = RewardSpec(
    about="Compares the final answer with the gold answer mathematically.",
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
    about="A random reward, for tests without a task.",
    make="hpcrl.rewards.fake:FakeReward",
    section=FakeOptions,
)

FUNCTION = RewardSpec(
    about="A user-defined function, called with the signature of verl, TRL, OpenRLHF or hpcrl.",
    make="hpcrl.rewards.function:FunctionReward",
    imports_code="function",
    scores_in_unit_interval=False,
)
