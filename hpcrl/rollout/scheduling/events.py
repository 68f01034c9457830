"""The rollout scheduler's events, its outgoing commands, and its results."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hpcrl.rollout.types import FinishReason, PromptOutcome


@dataclass(frozen=True, slots=True)
class Decoded:
    """A replica ended a decode chunk.

    Args:
        finished: (sample id, tokens generated, reason) of each finished response.
        turns: (sample id, tokens generated so far) of samples whose turn ended and whose environment acts now.
    """

    replica: int
    finished: tuple[tuple[int, int, FinishReason], ...] = ()
    turns: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Answered:
    """The environments of these samples answered; the observations are on the samples' replicas."""

    sample_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rewarded:
    """A sample's reward and score; the environment's reward (Played) is added. Ends the episode of an ACTING sample.

    Args:
        error: Why there is no reward.
        failed: Whether the error comes from the environment's code.
        metrics: Name -> value, such as each part of a composed reward.
        extracted: The answer that the reward found in a validation response.
    """

    sample_id: int
    reward: float
    score: float
    error: str = ""
    turn_rewards: tuple[float, ...] = ()
    token_rewards: bytes = b""
    failed: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    extracted: str | None = None


@dataclass(frozen=True, slots=True)
class Played:
    """A sample's episode ended with this reward and these metrics of its environment. A scorer will add its own."""

    sample_id: int
    reward: float
    turn_rewards: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Aborted:
    """Reply to a Drop: (sample id, tokens generated) of the samples that were still running."""

    lengths: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SamplesFailed:
    """These samples cannot end (refused request, crashed environment)."""

    sample_ids: tuple[int, ...]
    cause: str


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """A replica is lost with all of its samples."""

    replica: int


REPLICA_LOST = "a generator replica was lost"
ENV_LOST = "an env rank was lost"
"""Causes of failures outside the prompt."""


@dataclass(frozen=True, slots=True)
class ScorerLost:
    """The scorer of these samples is lost; they are scored again."""

    sample_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpeedChanged:
    """A replica decodes at this speed, relative to the median replica."""

    replica: int
    speed: float


SchedulerEvent = (
    Decoded | Answered | Rewarded | Played | Aborted | SamplesFailed | ReplicaLost | ScorerLost | SpeedChanged
)


def only(event: SchedulerEvent, mine: Callable[[int], bool]) -> SchedulerEvent | None:
    """The part of an event about the samples for which `mine` is true; None if there is none."""
    match event:
        case Decoded():
            finished = tuple(end for end in event.finished if mine(end[0]))
            turns = tuple(turn for turn in event.turns if mine(turn[0]))
            return replace(event, finished=finished, turns=turns) if finished or turns else None
        case Aborted():
            lengths = tuple(length for length in event.lengths if mine(length[0]))
            return Aborted(lengths) if lengths else None
        case Rewarded() | Played():
            return event if mine(event.sample_id) else None
        case Answered() | SamplesFailed() | ScorerLost():
            ids = tuple(filter(mine, event.sample_ids))
            return replace(event, sample_ids=ids) if ids else None
        case ReplicaLost() | SpeedChanged():
            return event


@dataclass(frozen=True, slots=True)
class Generate:
    """Start generating these samples."""

    replica: int
    sample_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Continue:
    """Generate the next turn of these samples."""

    replica: int
    sample_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendToScorer:
    """Send these finished samples to a living scorer."""

    replica: int
    sample_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Stop the samples that are running, and free all of these samples; answered with Aborted if any ran."""

    replica: int
    sample_ids: tuple[int, ...]


SchedulerCommand = Generate | Continue | SendToScorer | Drop


@dataclass(frozen=True, slots=True)
class DoneSample:
    """A scored response and the replica that holds its tokens; `num_tokens` counts generated tokens. `turn_rewards`,
    `token_rewards`, `metrics` and `extracted` are as in hpcrl.messaging.messages.ScoredSample. If `failed`, the
    environment's code failed, and the reward does not describe the response."""

    id: int
    replica: int
    num_tokens: int
    finish_reason: FinishReason
    reward: float
    score: float
    error: str = ""
    turn_rewards: tuple[float, ...] = ()
    token_rewards: bytes = b""
    metrics: Mapping[str, float] = field(default_factory=dict)
    failed: bool = False
    extracted: str | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt's responses in order of member. `version` is the oldest weight version that wrote any of them.
    `baseline` is the reward of the greedy baseline, which is not among the responses; None without one."""

    uid: int
    attempt: int
    version: int
    samples: tuple[DoneSample, ...]
    baseline: float | None = None


@dataclass(frozen=True, slots=True)
class EndedPrompt:
    """How a prompt ended. `reason` is the filter, or the cause of the last failure. `rewards` and `metrics` have an
    entry per sample, in order of member; empty if the prompt failed."""

    uid: int
    attempt: int
    outcome: PromptOutcome
    reason: str = ""
    rewards: tuple[float, ...] = ()
    metrics: tuple[Mapping[str, float], ...] = ()

    def saved(self) -> dict[str, Any]:
        """JSON-able content."""
        return asdict(self) | {"outcome": str(self.outcome)}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> EndedPrompt:
        """The EndedPrompt from saved()'s result."""
        outcome = PromptOutcome(saved["outcome"] if "outcome" in saved else saved["disposition"])  # until 0.6
        rewards, metrics = (tuple(saved.get(name, ())) for name in ("rewards", "metrics"))
        return cls(saved["uid"], saved["attempt"], outcome, saved["reason"], rewards, metrics)


class Outbox:
    """Commands since the last take(), by kind and replica."""

    def __init__(self) -> None:
        self._orders: dict[type, dict[int, list[int]]] = {}

    def put(self, kind: type, replica: int, sample_id: int) -> None:
        self._orders.setdefault(kind, {}).setdefault(replica, []).append(sample_id)

    def take(self, replicas: Container[int], living: Container[int]) -> list[SchedulerCommand]:
        """The commands, Drops first. Skips commands to lost replicas, for dropped samples, and Drops of living ones."""
        orders, self._orders = self._orders, {}
        return [
            kind(name, kept)
            for kind in (Drop, SendToScorer, Continue, Generate)
            for name, ids in sorted(orders.get(kind, {}).items())
            if name in replicas and (kept := tuple(i for i in ids if (i in living) != (kind is Drop)))
        ]
