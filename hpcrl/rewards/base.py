"""The interface of rewards, which score responses. A reward imports neither torch.distributed nor engines."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hpcrl.config import RewardConfig
from hpcrl.spec.tables import REWARDS

MAX_TOKEN_REWARDS = 256
"""Maximum token rewards of one response: they are sent through the controller."""


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """One turn of the model: the text, and the tokens as generated (empty without tokens, as in hpcrl.score)."""

    text: str
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One response to score: the last turn of the model, `response` as text and `token_ids` as it was generated.

    `prompt` is text, `answer` and `extra` come from the data row; after an episode `extra["messages"]` has all messages
    in chat form. `earlier`: the model's turns before the last.
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
        """All turns of the model in order; at least one."""
        return (*self.earlier, ModelTurn(self.response, self.token_ids))


@dataclass(frozen=True, slots=True)
class Score:
    """`reward` is used for the advantage, `score` (usually 0 or 1) for accuracy metrics and filters.

    A reward that failed is data: reward 0 and the cause in `error`. `given` and `gold`, if the reward compares: the
    part of the response that it took as the answer, and that of the row's answer. Both are for `python -m hpcrl.score`
    and are not sent to other ranks.

    The reward may be divided in one of two ways; otherwise the last turn has all of it. `turn_rewards`: one for each of
    the item's turns. `token_rewards`: for some tokens, by position from 0 among the model's tokens of all turns; at
    most MAX_TOKEN_REWARDS. Either must add up to `reward`, else the response has an error.
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
    """Scores come back in the order of the items. A reward may raise or hang: the pool turns both into data.

    Class attributes of a reward define how it is called; a subclass of this class inherits the usual values.
    """

    inline: bool = False
    """Cheap and safe: called in the rank itself, not in a worker process."""
    batched: bool = False
    """Many items per call; other rewards get one item per call."""
    scores: Literal["samples", "groups"] = "samples"
    """groups: a call has exactly the siblings of one prompt."""
    pool: Literal["process", "async"] = "process"
    """async: score() is a coroutine that waits for a service; a worker process runs reward.*.concurrency of them."""

    def score(self, items: Sequence[RewardItem]) -> Sequence[Score] | Awaitable[Sequence[Score]]: ...


def make_reward(config: RewardConfig) -> Reward:
    """The reward of a section of the configuration. ValueError if its options or its function are invalid."""
    made: Reward = REWARDS[config.name].load()(config)
    return made
