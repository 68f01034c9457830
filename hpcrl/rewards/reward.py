"""The interface of rewards, which imports neither torch.distributed nor engines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hpcrl.config import RewardConfig
from hpcrl.rewards.services import Services
from hpcrl.spec.media import Medium
from hpcrl.spec.tables import REWARDS

MAX_TOKEN_REWARDS = 256
"""Maximum token rewards of one response, since they are sent through the controller."""


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """One model turn: text, and tokens as generated (empty in `hpcrl score`)."""

    text: str
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One response to score.

    Args:
        prompt: The prompt as text; `messages` is the prompt in chat form (empty in `hpcrl score`).
        response: The model's last turn as text; `token_ids` has its tokens as generated, `earlier` the previous turns.
        answer: The row's answer; None if it has none.
        extra: The row's other columns; after an episode, `extra["messages"]` has the whole dialogue in chat form.
        images: The prompt's images as the model saw them, for rewards that get them (RewardSpec.shown_images).
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
    messages: Sequence[Mapping[str, Any]] = ()
    images: Sequence[Medium] = ()

    @property
    def turns(self) -> tuple[ModelTurn, ...]:
        """All turns of the model in order; at least one."""
        return (*self.earlier, ModelTurn(self.response, self.token_ids))


@dataclass(frozen=True, slots=True)
class Score:
    """The result for one response. Without turn_rewards and token_rewards, the last turn gets the whole reward.

    Args:
        reward: The number from which the advantage is computed.
        score: A number for accuracy metrics and filters, usually 0 or 1.
        error: Why the response could not be scored; the reward is then 0.
        turn_rewards: One reward for each of the item's turns. They must add up to `reward`.
        token_rewards: Rewards of at most MAX_TOKEN_REWARDS tokens, by position from 0 among the model's tokens of all
            turns. They must add up to `reward`.
        extracted: The answer that was extracted from the response, for `hpcrl score` and validation's majority vote.
        ground_truth: The answer that was extracted from the row, shown only by `python -m hpcrl score`.
    """

    reward: float
    score: float
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    turn_rewards: Sequence[float] = ()
    token_rewards: Mapping[int, float] = field(default_factory=dict)
    extracted: str | None = field(default=None, compare=False)
    ground_truth: str | None = field(default=None, compare=False)


class Reward(Protocol):
    """Returns scores in the order of the items. If a reward raises or hangs, the pool records an error for the sample.
    Class attributes define how a reward is called; subclasses inherit the usual values."""

    inline: bool = False
    """Whether the reward is cheap and safe: it is then called in the rank itself, not in a worker process."""
    batched: bool = False
    """Whether a call gets many items; other rewards get one item per call."""
    scores: Literal["samples", "groups"] = "samples"
    """groups: a call gets exactly the members of one group."""
    pure: bool = False
    """The score is a function of the item without its sample_id; equal responses to a row then need only one call."""
    pool: Literal["process", "async"] = "process"
    """async: score() is a coroutine that waits for a service; a worker process runs reward.*.concurrency of them."""

    def connect(self, services: Services) -> None:
        """Called before start() in a run, with the ranks that serve models (RewardSpec.asks)."""
        return None

    def start(self) -> None:
        """Called once in the scoring process, before the first response. ValueError if nothing can be scored there."""
        return None

    def score(self, items: Sequence[RewardItem]) -> Sequence[Score] | Awaitable[Sequence[Score]]: ...

    def problem_of_row(self, answer: Any, extra: Mapping[str, Any]) -> str:
        """Why responses to a row with this answer (None: no answer) and these columns cannot be scored; empty if they
        can. If a built-in reward overrides this method, every row is checked before the start."""
        return ""


class PerResponse(Reward):
    """A reward that scores each response separately. If equal responses may get different scores, set pure=False."""

    pure = True

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        return [self.score_one(item) for item in items]

    @abstractmethod
    def score_one(self, item: RewardItem) -> Score: ...


def required_answer(item: RewardItem) -> Any:
    """The answer of the item's row. ValueError without one."""
    if item.answer is None:
        raise ValueError("the row has no answer to compare with (data.answer_key)")
    return item.answer


def make_reward(config: RewardConfig) -> Reward:
    """The reward of a section of the configuration. ValueError if its options or its function are invalid."""
    made: Reward = REWARDS[config.name].load()(config)
    return made
