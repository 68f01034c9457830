"""The samples of a run's rollout files, one object each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrl.rollout.store import RolloutReader, StepRollouts
from hpcrl.rollout.types import STATUS, split_sample_id
from hpcrl.system.files import committed_step


@dataclass(frozen=True)
class StoredSample:
    """A sample that was trained on in `step`.

    Args:
        prompt: The contents of the messages before the first answer, with blank lines between them.
        response: The contents of the answers of the model and an expert (imitation.expert_turns), in the same form.
        messages: Prompt, turns and messages of the environment or tools in chat form; an image is `<image>`.
        domain: Empty if the step's file of outcomes does not have it.
        prompt_id: Equal for all samples of a group; `member` is the sample's number in the group.
        finish_reason: stop, length or abort.
        num_tokens: Tokens that the model wrote.
        token_ids: int64 [tokens], with the prompt; `written` bool [tokens]: by the model, not by an expert.
        logprobs: float32 [tokens], the generator's; 0 where not written by the model.
        metrics: Parts of the reward and metrics of the environment, by name.
    """

    step: int
    prompt: str
    response: str
    reward: float
    score: float
    domain: str
    prompt_id: int
    member: int
    finish_reason: str
    num_tokens: int
    metrics: Mapping[str, float]
    messages: list[dict[str, Any]] = field(repr=False)
    token_ids: NDArray[np.int64] = field(repr=False)
    written: NDArray[np.bool_] = field(repr=False)
    logprobs: NDArray[np.float32] = field(repr=False)


def read_samples(run_dir: Path, step: int | None) -> Iterator[StoredSample]:
    """The samples of a step, or of all steps. Without a step, steps past the newest checkpoint that cannot be read are
    skipped: the run may be writing them, or may move them away."""
    reader = RolloutReader(run_dir, provisional=True)
    for each in reader.steps() if step is None else [step]:
        try:
            rollouts, domains = reader.read(each), reader.domains(each)
        except (ValueError, OSError):
            if step is None and each > committed_step(run_dir):
                continue
            raise
        yield from _samples(rollouts, {uid: name for name, uids in domains.items() for uid in uids})


def _samples(rollouts: StepRollouts, domains: Mapping[int, str]) -> Iterator[StoredSample]:
    batch = rollouts.batch
    starts, turns = batch.cu_seqlens.tolist(), batch.cu_turns.tolist()
    written = (batch.loss_mask & (batch.versions >= 0)).numpy().astype(bool)  # others are an expert's
    ids, logprobs = batch.token_ids.numpy(), batch.gen_logprobs.numpy()
    for row, sample_id in enumerate(batch.sample_ids.tolist()):
        place = slice(starts[row], starts[row + 1])
        messages = rollouts.messages(row)
        prompt, response = _divided(messages, turns[row + 1] - turns[row])
        uid, _, member = split_sample_id(sample_id)
        yield StoredSample(
            step=rollouts.step,
            prompt=prompt,
            response=response,
            reward=float(batch.rewards[row]),
            score=float(batch.scores[row]),
            domain=domains.get(uid, ""),
            prompt_id=uid,
            member=member,
            finish_reason=str(STATUS[int(batch.status[row])]),
            num_tokens=int(written[place].sum()),
            messages=messages,
            metrics=rollouts.metrics[row],
            token_ids=ids[place].copy(),
            written=written[place].copy(),
            logprobs=np.where(written[place], logprobs[place], np.float32(0)),
        )


def _divided(messages: list[dict[str, Any]], num_turns: int) -> tuple[str, str]:
    """(prompt, response) as text; the last `num_turns` messages of the assistant are the model's."""
    said = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
    own = said[len(said) - num_turns :] if num_turns else []
    begins = own[0] if own else len(messages)
    return _joined(messages[:begins]), _joined([messages[number] for number in own])


def _joined(messages: list[dict[str, Any]]) -> str:
    return "\n\n".join(str(message.get("content") or "") for message in messages)
