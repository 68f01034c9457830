"""What a reward is: scores for responses. A reward imports neither torch.distributed nor engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One response to score. `prompt` and `response` are text, `answer` and `extra` what the data row held."""

    sample_id: int
    domain: str
    prompt: str
    response: str
    answer: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = "stop"


@dataclass(frozen=True, slots=True)
class Score:
    """`reward` goes into the advantage, `score` (usually 0 or 1) into accuracy metrics and filters.

    A reward that failed is data: reward 0 and the cause in `error`. `given` and `gold` are what the reward compared,
    where it compares: the part of the response that it took as the answer, and that of the row's answer. They are for
    `python -m hpcrl.score`, and stay where the reward is.
    """

    reward: float
    score: float
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    given: str | None = field(default=None, compare=False)
    gold: str | None = field(default=None, compare=False)


class Reward(Protocol):
    """Scores come back in the order of the items. May raise or hang: the pool that calls it turns both into data."""

    inline: bool  # cheap and harmless: called in the rank itself, not in a worker process
    batched: bool  # wants many items per call; others get one item at a time

    def score(self, items: Sequence[RewardItem]) -> list[Score]: ...
