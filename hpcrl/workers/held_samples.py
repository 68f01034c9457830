"""A sample's state on a generator rank, from its admission until it is dropped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as default
from typing import Any

import numpy as np

from hpcrl.config import Config
from hpcrl.engines.gen.generation_engine import Output
from hpcrl.messaging.messages import Ended, EnvObservation, PromptPayload
from hpcrl.rollout.types import FinishReason, Sample
from hpcrl.spec.image_rows import image_rows
from hpcrl.spec.media import IMAGE_MARK, IMAGES, Medium, by_picture, placed
from hpcrl.spec.trajectory import Field, Level, Origin, fields_of, generated_fields


class PromptState:
    """A prompt, shared by its group members.

    Attributes:
        played: Whether the prompt's domain has an environment.
        max_tokens: Maximum number of model tokens in an episode.
        by_steps: Whether each turn is a separate sequence; `has_states`, whether this holds for any environment.
    """

    def __init__(self, payload: PromptPayload, config: Config):
        env = config.env_of(payload.domain)
        self.domain, self.meta, self.played = payload.domain, payload.meta, env is not None
        self.max_tokens = env.max_tokens if env is not None else None
        self.max_sequence_tokens = config.max_turn_tokens if env is None else config.sequence_tokens(env)
        self.by_steps, self.has_states = env is not None and env.by_steps, config.by_steps
        self.token_ids = np.frombuffer(payload.token_ids, dtype=np.int32)
        self.media = payload.media
        self.messages: list[dict[str, Any]] = json.loads(payload.meta)["messages"]


@dataclass(eq=False)
class SampleState:
    """A sample on its generator rank."""

    id: int
    known_prompt: PromptState | None
    max_new_tokens: int = 0  # per turn
    rollout: Sample | None = None  # None before the first turn has ended or an episode has started
    env: int | None = None  # the rank of its environment
    media: list[Medium] = default(default_factory=list)  # of the rollout
    shown: list[Medium] = default(default_factory=list)  # per mark in the rollout's messages, the whole picture
    expert: str = ""  # the text of the next turn if the environment's expert plays it

    @property
    def prompt(self) -> PromptState:
        """The sample's prompt; a finished sample from a checkpoint has none."""
        assert self.known_prompt is not None, f"sample {self.id} was finished before this start"
        return self.known_prompt

    @property
    def held(self) -> Sample:
        """The sample's rollout, which must exist."""
        assert self.rollout is not None, f"sample {self.id} has neither ended a turn nor begun an episode"
        return self.rollout

    @property
    def next_turn(self) -> int:
        """The next turn's number."""
        return int(self.held.turn_ids.max()) + 1

    @property
    def context(self) -> np.ndarray:
        """int32 [n]: the tokens before the next turn: the trajectory or, by steps, the next turn's own prompt."""
        if self.rollout is None:
            return self.prompt.token_ids
        ids, begins = self.held.token_ids, np.zeros(0, np.int64)
        if self.held.states is not None:
            begins = self.held.states.nonzero()[0]
        return ids[begins[-1] :] if len(begins) else ids

    @property
    def context_media(self) -> tuple[Medium, ...]:
        """The media of `context`, with their places in it."""
        if self.rollout is None:
            return self.prompt.media
        begins = len(self.held.token_ids) - len(self.context)
        return tuple(placed(medium, -begins) for medium in self.media if medium.start >= begins)

    @property
    def num_model_tokens(self) -> int:
        """Number of tokens in the sample's ended turns."""
        return int(self.rollout.loss_mask.sum()) if self.rollout is not None else 0

    def begin(
        self,
        truncated: bool,
        token_ids: np.ndarray | None = None,
        messages: list[dict[str, Any]] | None = None,
        media: Sequence[Medium] = (),
    ) -> Sample:
        """Set the rollout to a prompt without a response, by default the row's own prompt. `truncated` adds the fields
        for truncated sampling. Other ragged fields than `images` are empty until they are set."""
        if token_ids is None or messages is None:
            token_ids, messages, media = self.prompt.token_ids, self.prompt.messages, self.prompt.media
        columns = {
            field.name: np.full(field.shape(0 if field.ragged else len(token_ids)), field.fill, dtype=field.travels_as)
            for field in generated_fields(truncated, self.prompt.has_states)
            if field.level is Level.TOKEN or field.ragged
        }
        self.rollout = Sample(self.id, messages=messages, **(columns | {"token_ids": token_ids}))
        self._show(media)
        self.shown = [picture[-1] for picture in by_picture(media)]
        return self.rollout

    def _show(self, media: Sequence[Medium]) -> None:
        """Set the media of the rollout, with their places in it."""
        self.media = list(media)
        if IMAGES.name in self.held.columns:
            self.held.put(IMAGES.name, image_rows(self.media))
            self.held.pictures = {medium.digest: medium.content for medium in self.media}

    def end_turn(self, output: Output, text: str) -> None:
        """Add a model turn."""
        sample = self.rollout or self.begin(output.gen_logprobs_behaviour is not None)
        _append(sample, output.token_ids, output)
        sample.messages.append({"role": "assistant", "content": text})
        sample.finish_reason = output.finish_reason

    def take_turn(self, token_ids: np.ndarray) -> None:
        """Add the next turn as the environment's expert has written it; int32 [n]. Its tokens are trained on, but were
        generated with no weights (version -1) and have no log-probs."""
        _append(self.held, token_ids, None, by_expert=True)
        self.held.messages.append({"role": "assistant", "content": self.expert})
        self.held.finish_reason, self.expert = FinishReason.STOP, ""

    def observe(self, observation: EnvObservation) -> None:
        """Add an observation. At the start of an episode, it replaces the row's prompt unless it has no tokens. If
        turns are separate sequences, its tokens are the next turn's whole prompt."""
        token_ids, messages = np.frombuffer(observation.token_ids, dtype=np.int32), json.loads(observation.messages)
        by_steps, start, shown = self.prompt.by_steps, len(self.held.token_ids), messages
        self.expert = observation.expert
        if self.held.turn_ids[-1] >= 0:
            _append(self.held, token_ids, None, by_steps)
            self.held.messages += messages
            # In episodes by steps, pictures of earlier turns precede the observation's own.
            self.shown += [picture[-1] for picture in _latest(by_picture(observation.media), num_marks(messages))]
            self._show([*self.media, *(placed(medium, start) for medium in observation.media)])
        else:
            if len(token_ids):
                self.begin("gen_logprobs_behaviour" in self.held.columns, token_ids, messages, observation.media)
            start, shown = 0, self.held.messages[-1:]
        if by_steps:
            self.held.states[start] = _hash(shown, _latest(self.shown, num_marks(shown)))

    def take_back(self) -> None:
        """Remove the observation after the model's last turn."""
        sample = self.held
        written = sample.loss_mask.nonzero()[0]
        total = int(written[-1]) + 1 if len(written) else len(sample.token_ids)
        for field in _token_fields(sample):
            sample.columns[field.name] = sample.columns[field.name][:total]
        self._show([medium for medium in self.media if medium.start < total])
        while len(written) and sample.messages[-1]["role"] != "assistant":
            del self.shown[len(self.shown) - num_marks([sample.messages.pop()]) :]
        sample.finish_reason = FinishReason.STOP

    def as_episode(self) -> str:
        """The JSON object of hpcrl.messaging.messages.ReadEpisodes."""
        messages: list[dict[str, Any]] = json.loads(self.held.text())
        turns = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
        begin = turns[-self.next_turn] if 0 < self.next_turn <= len(turns) else len(messages)
        pictures = self.shown[: num_marks(self.held.messages[:begin])]
        images = [picture.digest.hex() for picture in pictures]
        return json.dumps({"prompt": messages[:begin], "response": messages[begin:], "images": images})

    def ended(self, with_text: bool) -> Ended:
        """How the sample's turn ended; `with_text` includes the size of its messages in bytes."""
        sample = self.held
        text_bytes = len(sample.text()) if with_text else 0
        return Ended(self.id, len(sample.token_ids), self.num_model_tokens, str(sample.finish_reason), text_bytes)


def _append(
    sample: Sample, token_ids: np.ndarray, output: Output | None, is_prompt: bool = False, by_expert: bool = False
) -> None:
    """Add a model turn (output), an expert's turn (by_expert) or an observation to a sample; `is_prompt` marks the next
    turn's own prompt."""
    last, before = int(sample.turn_ids.max()), len(sample.token_ids)
    is_turn = by_expert or output is not None
    known: dict[str, Any] = {
        "token_ids": token_ids,
        "loss_mask": is_turn,
        "turn_ids": -1 if is_prompt else last + is_turn,
        "states": 0,
    }
    for field in _token_fields(sample):
        value = known.get(field.name, field.fill)
        if field.name not in known and output is not None:
            value = output.columns[field.name] if field.name in output.columns else getattr(output, field.name)
        column = np.empty(field.shape(before + len(token_ids)), dtype=field.travels_as)
        column[:before], column[before:] = sample.columns[field.name], value
        sample.columns[field.name] = column


def num_marks(messages: Iterable[Mapping[str, Any]]) -> int:
    """Number of pictures in messages."""
    return sum((message.get("content") or "").count(IMAGE_MARK) for message in messages)


def _latest(items: list[Any], count: int) -> list[Any]:
    return items[len(items) - count :]


def _hash(messages: list[dict[str, Any]], pictures: Iterable[Medium]) -> int:
    """A non-zero 31-bit hash of the messages and their pictures."""
    content = json.dumps(messages).encode() + b"".join(picture.digest for picture in pictures)
    digest = hashlib.blake2b(content, digest_size=4).digest()
    return (int.from_bytes(digest, "little") >> 1) or 1


def _token_fields(sample: Sample) -> list[Field]:
    """The sample's token fields."""
    return [field for field in fields_of(Origin.GENERATOR, Level.TOKEN) if field.name in sample.columns]
