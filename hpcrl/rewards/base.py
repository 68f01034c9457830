"""What a reward is: scores for responses. A reward imports neither torch.distributed nor engines."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hpcrl.config import RewardConfig
from hpcrl.spec.tables import REWARDS

MAX_TOKEN_REWARDS = 256
"""Most rewards of tokens that one response may be given: they travel through the controller."""


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """What the model wrote in one turn: the text, and the tokens as they were generated (empty where there are none, as
    in hpcrl.score)."""

    text: str
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One response to score: the last turn of the model, `response` as text and `token_ids` as it was generated.

    `prompt` is text, `answer` and `extra` are what the data row held; after an episode `extra["messages"]` has all that
    was said, in chat form. `earlier`: the turns of the model before the last.
    """

    sample_id: int
    domain: str
    prompt: str
    response: str
    answer: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = "stop"
    token_ids: Sequence[int] = ()
    earlier: Sequence[ModelTurn] = ()

    @property
    def turns(self) -> tuple[ModelTurn, ...]:
        """All turns of the model in order, at least one."""
        return (*self.earlier, ModelTurn(self.response, self.token_ids))


@dataclass(frozen=True, slots=True)
class Score:
    """`reward` goes into the advantage, `score` (usually 0 or 1) into accuracy metrics and filters.

    A reward that failed is data: reward 0 and the cause in `error`. `given` and `gold` are what the reward compared,
    where it compares: the part of the response that it took as the answer, and that of the row's answer. They are for
    `python -m hpcrl.score`, and stay where the reward is.

    How the reward is divided, in one of two ways; without either all of it is the last turn's. `turn_rewards`: one for
    each of the item's turns. `token_rewards`: for some tokens, by their position among those that the model wrote in
    all of its turns, from 0; at most MAX_TOKEN_REWARDS. Either adds up to `reward`, or the response has an error.
    """

    reward: float
    score: float
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    turn_rewards: Sequence[float] = ()
    token_rewards: Mapping[int, float] = field(default_factory=dict)
    given: str | None = field(default=None, compare=False)
    gold: str | None = field(default=None, compare=False)


class Reward(Protocol):
    """Scores come back in the order of the items. May raise or hang: the pool that calls it turns both into data.

    A reward says as class attributes how it wants to be called; a subclass of this class inherits the usual answers.
    """

    inline: bool = False
    """Cheap and harmless: called in the rank itself, not in a worker process."""
    batched: bool = False
    """Wants many items per call; others get one item at a time."""
    scores: Literal["samples", "groups"] = "samples"
    """groups: a call has all siblings of one prompt, and nothing else."""
    pool: Literal["process", "async"] = "process"
    """async: score() is a coroutine that waits for a service; a worker process runs reward.*.concurrency of them."""

    def score(self, items: Sequence[RewardItem]) -> Sequence[Score] | Awaitable[Sequence[Score]]: ...


def make_reward(config: RewardConfig) -> Reward:
    """The reward of a section of the configuration. ValueError when its options or its function do not fit."""
    made: Reward = REWARDS[config.name].load()(config)
    return made
