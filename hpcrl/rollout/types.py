"""Rollout types: prompts, sample ids, samples, outcomes. Without torch, so the scheduler and its tests need none."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from hpcrl.spec.media import IMAGE_MARK, WRITTEN_MARK, Medium
from hpcrl.spec.trajectory import FIELDS

MEMBER_BITS = 14
ATTEMPT_BITS = 10
GREEDY_MEMBER = (1 << MEMBER_BITS) - 1
"""The group member that is decoded greedily, as the group's baseline; it is not trained on."""
MAX_GROUP_SIZE = GREEDY_MEMBER
"""Largest number of sampled responses to a prompt."""
MAX_ATTEMPTS = 1 << ATTEMPT_BITS
ANSWER_IDS = 1 << 62
"""From here on, sample ids are those of rows of answers in a batch of rollouts (hpcrl.workers.mixing)."""
FIRST_VALIDATION_UID = 1 << 38
"""First uid of validation prompts; all uids of training prompts are lower."""
ROW_BITS = 20
MAX_VALIDATION_ROWS = 1 << ROW_BITS


class PromptOutcome(StrEnum):
    """How a prompt of an epoch ended; exactly one of these on the committed lineage."""

    TRAINED = "trained"
    FILTERED = "filtered"
    TOO_LONG = "too_long"
    FAILED = "failed"


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"  # a stop string, a stop id or the end-of-sequence id
    LENGTH = "length"  # max_new_tokens
    ABORT = "abort"  # cut short by the scheduler; the partial tokens are kept


TOKEN_REWARD = np.dtype([("position", "<u4"), ("reward", "<f4")])
"""A reward of one token: its position, from 0, among the model's tokens in all turns of the row."""
STATUS = tuple(FinishReason)
"""The field `status` has the index of a reason in this tuple."""


def make_sample_id(uid: int, attempt: int, member: int) -> int:
    """Sample id of `member` of prompt `uid` in its `attempt`: one integer that sorts by prompt, attempt, member.
    ValueError if attempt or member does not fit its field."""
    if not (uid >= 0 and 0 <= attempt < MAX_ATTEMPTS and 0 <= member < 1 << MEMBER_BITS):
        raise ValueError(f"no sample id for prompt {uid}, attempt {attempt}, member {member}")
    return (uid << (ATTEMPT_BITS + MEMBER_BITS)) | (attempt << MEMBER_BITS) | member


def split_sample_id(sample_id: int) -> tuple[int, int, int]:
    """(uid, attempt, member) of a sample id."""
    return (
        sample_id >> (ATTEMPT_BITS + MEMBER_BITS),
        (sample_id >> MEMBER_BITS) & (MAX_ATTEMPTS - 1),
        sample_id & ((1 << MEMBER_BITS) - 1),
    )


def is_greedy(sample_id: int) -> bool:
    """Whether the sample is its group's greedy baseline."""
    return split_sample_id(sample_id)[2] == GREEDY_MEMBER


def validation_uid(evaluation: int, row: int) -> int:
    """Uid of a validation prompt in the n-th evaluation. Uids differ between evaluations, since a late answer must not
    count in the next evaluation; they repeat after 262,144 evaluations."""
    assert row < MAX_VALIDATION_ROWS, "checked by hpcrl.config"
    return FIRST_VALIDATION_UID + (evaluation % (FIRST_VALIDATION_UID >> ROW_BITS) << ROW_BITS) + row


def is_validation(sample_id: int) -> bool:
    """Whether the sample belongs to an evaluation."""
    return split_sample_id(sample_id)[0] >= FIRST_VALIDATION_UID


def episode_seed(seed: int, uid: int) -> int:
    """31-bit seed of a prompt's environments, since common random generators take no more. Training seeds are below
    2**30. Validation seeds are 2**30 or more, and a validation prompt has an equal seed in every evaluation."""
    validation = uid >= FIRST_VALIDATION_UID
    origin = FIRST_VALIDATION_UID + uid % MAX_VALIDATION_ROWS if validation else uid
    digest = hashlib.blake2b(f"{seed}/{origin}/episode".encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "little") >> 2) | (validation << 30)


def sampling_seed(seed: int, sample_id: int) -> int:
    """63-bit sampling seed, a function of run seed, prompt, attempt and member only."""
    digest = hashlib.blake2b(f"{seed}/{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def receiver_of(sample_id: int, ranks: Sequence[int], alive: Collection[int]) -> int:
    """The rank that scores a sample or runs its environment, equal for all members of a group: the first living rank in
    an order specific to the prompt. So the loss of a rank moves only that rank's samples."""
    if len(alive) == 1:
        return next(iter(alive))
    order, left = split_sample_id(sample_id)[0], list(ranks)
    while left:
        order, place = divmod(order, len(left))
        if (rank := left.pop(place)) in alive:
            return rank
    raise ValueError(f"none of the ranks {list(ranks)} is alive")


@dataclass(frozen=True)
class Sizes:
    """A finished sample's tokens (in total, with prompt and observations; of the model only) and bytes of messages."""

    total: int
    model: int
    text: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt drawn from the data.

    `uid` counts draws over the whole run, so it is unique over epochs and domains. `answer` is the gold answer for the
    reward (any JSON value); `extra` holds the row's columns without prompt and images; `text` was rendered from
    `messages` and `tools`. `media` go to the generator ranks, which send them to trainers. `teacher_ids` are
    the tokens that a teacher reads in place of token_ids (teacher.context).
    """

    uid: int
    domain: str
    epoch: int
    row: int
    token_ids: tuple[int, ...]
    text: str
    answer: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    media: tuple[Medium, ...] = ()
    teacher_ids: tuple[int, ...] = ()


class Sample:
    """A response (of one or more turns) on the rank that generated it.

    Args:
        messages: Prompt, turns and observations in chat form.
        columns: The generator's fields of hpcrl.spec.trajectory by name, in their transfer dtypes; each is also an
            attribute, None if the sample lacks it. Token fields include the prompt; put() sets ragged fields.

    Attributes:
        pictures: The pixels of the images of its field `images`, by digest; shared between samples.
    """

    __slots__ = ("columns", "error", "id", "messages", "pictures", "reward", "score")

    def __init__(
        self,
        id: int,
        finish_reason: FinishReason = FinishReason.STOP,
        reward: float = 0.0,
        score: float = 0.0,
        error: str = "",
        messages: Iterable[dict[str, Any]] = (),
        **columns: np.ndarray | None,
    ):
        self.id, self.reward, self.score, self.error = id, reward, score, error
        self.messages = list(messages)
        self.pictures: dict[bytes, bytes] = {}
        self.columns: dict[str, np.ndarray] = {}
        for name, column in columns.items():
            if column is not None:
                self.put(name, column)
        self.finish_reason = finish_reason

    def __getattr__(self, name: str) -> Any:
        if name in FIELDS:
            return self.columns.get(name)
        raise AttributeError(f"a sample has no field {name!r}")

    def put(self, name: str, column: np.ndarray) -> None:
        """Set a field; for a ragged field also the field with the number of its values."""
        self.columns[name] = column
        if FIELDS[name].ragged:
            counts = FIELDS[name].counts
            self.columns[counts.name] = np.array([len(column)], dtype=counts.travels_as)

    def text(self) -> bytes:
        """The messages as transferred and stored."""
        text = json.dumps(self.messages, ensure_ascii=False).replace(IMAGE_MARK, WRITTEN_MARK)
        return text.encode(errors="replace")

    @property
    def finish_reason(self) -> FinishReason:
        """Why the response ended; stored as the field `status`."""
        return STATUS[self.columns["status"][0]]

    @finish_reason.setter
    def finish_reason(self, reason: FinishReason) -> None:
        self.columns["status"] = np.array([STATUS.index(reason)], dtype=FIELDS["status"].travels_as)
