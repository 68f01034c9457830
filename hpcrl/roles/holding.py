"""State of a sample on a generator rank, from its admission until it is forgotten."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcrl.control.messages import Ended, PromptPayload, TurnDelta
from hpcrl.engines.gen.base import Output
from hpcrl.rollout.types import FinishReason, Sample
from hpcrl.trajectory import Field, Level, Origin, fields_of


class HeldPrompt:
    """A prompt that siblings share. played: its domain has an environment."""

    def __init__(self, payload: PromptPayload, played: bool):
        self.domain, self.meta, self.played = payload.domain, payload.meta, played
        self.token_ids = np.frombuffer(payload.token_ids, dtype=np.int32)
        self.messages: list[dict[str, Any]] = json.loads(payload.meta)["messages"]


@dataclass(eq=False)
class HeldSample:
    """A sample.

    rollout: its content after its first turn, or from the start of its episode. max_new_tokens: of a turn. env: the
    rank of its environment.
    """

    id: int
    known_prompt: HeldPrompt | None
    max_new_tokens: int = 0
    rollout: Sample | None = None
    env: int | None = None

    @property
    def prompt(self) -> HeldPrompt:
        """Its prompt; missing for a finished sample from a checkpoint."""
        assert self.known_prompt is not None, f"sample {self.id} was finished before this start"
        return self.known_prompt

    @property
    def held(self) -> Sample:
        """Its rollout, which must exist."""
        assert self.rollout is not None, f"sample {self.id} has neither ended a turn nor begun an episode"
        return self.rollout

    @property
    def num_model_tokens(self) -> int:
        """Tokens of its ended turns."""
        return int(self.rollout.loss_mask.sum()) if self.rollout is not None else 0

    def begin(
        self,
        truncated: bool,
        token_ids: np.ndarray | None = None,
        messages: list[dict[str, Any]] | None = None,
    ) -> Sample:
        """Hold only a prompt, by default the row's own. truncated: with the optional fields."""
        if token_ids is None or messages is None:
            token_ids, messages = self.prompt.token_ids, self.prompt.messages
        columns = {
            field.name: np.full(field.shape(len(token_ids)), field.fill, dtype=field.travels_as)
            for field in fields_of(Origin.GENERATOR, Level.TOKEN)
            if truncated or not field.optional
        }
        self.rollout = Sample(self.id, messages=messages, **(columns | {"token_ids": token_ids}))
        return self.rollout

    def end_turn(self, output: Output, text: str) -> None:
        """Add a turn of the model."""
        sample = self.rollout or self.begin(output.gen_logprobs_behaviour is not None)
        _append(sample, output.token_ids, output)
        sample.messages.append({"role": "assistant", "content": text})
        sample.finish_reason = output.finish_reason

    def observe(self, observation: TurnDelta) -> None:
        """Add an observation; at the start of an episode it replaces the row's prompt."""
        token_ids, messages = np.frombuffer(observation.token_ids, dtype=np.int32), json.loads(observation.messages)
        if self.held.turn_ids[-1] >= 0:
            _append(self.held, token_ids, None)
            self.held.messages += messages
        elif len(token_ids):
            self.begin("gen_logprobs_behaviour" in self.held.columns, token_ids, messages)

    def take_back(self) -> None:
        """Remove the observation after the last turn of the model."""
        sample = self.held
        written = sample.loss_mask.nonzero()[0]
        total = int(written[-1]) + 1 if len(written) else len(sample.token_ids)
        for field in _token_fields(sample):
            sample.columns[field.name] = sample.columns[field.name][:total]
        while len(written) and sample.messages[-1]["role"] != "assistant":
            sample.messages.pop()
        sample.finish_reason = FinishReason.STOP

    def ended(self, with_text: bool) -> Ended:
        """How its turn ended; with_text: with the bytes of its messages."""
        sample = self.held
        text_bytes = len(sample.text()) if with_text else 0
        return Ended(self.id, len(sample.token_ids), self.num_model_tokens, str(sample.finish_reason), text_bytes)


def _append(sample: Sample, token_ids: np.ndarray, output: Output | None) -> None:
    """Add a model turn (output) or an observation (None) to a sample."""
    known: dict[str, Any] = {
        "token_ids": token_ids,
        "loss_mask": output is not None,
        "turn_ids": int(sample.turn_ids[-1]) + (output is not None),
    }
    for field in _token_fields(sample):
        value = known.get(field.name, field.fill)
        if field.name not in known and output is not None:
            value = output.columns[field.name] if field.name in output.columns else getattr(output, field.name)
        column = np.broadcast_to(np.asarray(value, dtype=field.travels_as), field.shape(len(token_ids)))
        sample.columns[field.name] = np.concatenate([sample.columns[field.name], column])


def _token_fields(sample: Sample) -> list[Field]:
    """The token fields of a sample."""
    return [field for field in fields_of(Origin.GENERATOR, Level.TOKEN) if field.name in sample.columns]
