"""Rows of an evaluation's responses (hpcrl.metrics.responses), read from the replicas that hold them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hpcrl.config import Config
from hpcrl.controller.generation import evaluation_sampling
from hpcrl.data.identity import prompt_id
from hpcrl.data.source import RowOrigin
from hpcrl.messaging.dispatcher import Controller
from hpcrl.messaging.messages import ReadEpisodes, ReadTexts
from hpcrl.rollout.scheduling.events import DoneSample, Group
from hpcrl.rollout.types import FinishReason, Prompt, Sizes
from hpcrl.spec.media import IMAGE_MARK, WRITTEN_MARK, by_picture

MAX_TOKENS, MAX_TEXTS = 1 << 20, 256
"""Limits of the responses in one message, which has at most 64 MiB."""


class PromptAnswer(NamedTuple):
    """A validation prompt's responses, their sizes, and the row's place."""

    prompt: Prompt
    group: Group
    sizes: Sequence[Sizes]
    origin: RowOrigin


def scored_rows(config: Config, answers: Sequence[PromptAnswer]) -> list[dict[str, Any]]:
    """A row for each response, without prompt_id, prompt and response."""
    return [
        _row(config, answer, number, sample, size)
        for answer in answers
        for number, (sample, size) in enumerate(zip(answer.group.samples, answer.sizes, strict=True))
    ]


def whole_rows(controller: Controller, config: Config, answers: Sequence[PromptAnswer]) -> list[dict[str, Any]]:
    """A row for each response, without those of a replica that is lost."""
    told, rows = _read(controller, config, answers), []
    for answer in answers:
        played = config.env_of(answer.prompt.domain) is not None
        known = {} if played else _of_prompt(answer.prompt)
        for sample, row in zip(answer.group.samples, scored_rows(config, [answer]), strict=True):
            if (text := told.get(sample.id)) is not None:
                rows.append({**row, **(_of_episode(text) if played else {**known, "response": text})})
    return rows


def set_headers(config: Config, answers: Sequence[tuple[Prompt, RowOrigin]]) -> dict[str, dict[str, Any]]:
    """Set -> temperature, samples, max_new_tokens and path of its prompts."""
    found: dict[str, dict[str, Any]] = {}
    for prompt, origin in answers:
        own = found.setdefault(prompt.domain, {})
        if not own:
            asked = config.eval.of_domain(prompt.domain)
            limit = evaluation_sampling(config, asked).max_new_tokens
            if prompt.domain in config.rollout.domains:
                limit = min(limit, config.rollout.of_domain(prompt.domain).max_new_tokens)
            own |= {"temperature": asked.temperature, "samples": asked.samples, "max_new_tokens": limit}
            own["path"] = origin.path
        elif origin.path not in own["path"].split(", "):
            own["path"] += f", {origin.path}"
    return found


def _row(config: Config, answer: PromptAnswer, number: int, sample: DoneSample, size: Sizes) -> dict[str, Any]:
    asked = config.eval.of_domain(answer.prompt.domain)
    return {
        "set": answer.prompt.domain,
        "row": answer.origin.place,
        "sample": number,
        "greedy": asked.temperature == 0,
        "score": sample.score,
        "rewards": {name: value for name, value in sample.metrics.items() if math.isfinite(value)},
        "answer": sample.extracted,
        "tokens": size.model,
        "truncated": sample.finish_reason is FinishReason.LENGTH,
        "error": sample.error or None,
        "tags": _tags(answer.prompt.extra.get("tags")),
    }


def _tags(given: Any) -> list[str]:
    """The row's column `tags`: a text or a list of texts."""
    return [str(tag) for tag in (given if isinstance(given, list | tuple) else [given]) if tag is not None]


def _of_prompt(prompt: Prompt) -> dict[str, Any]:
    text = json.dumps(prompt.messages, ensure_ascii=False).replace(IMAGE_MARK, WRITTEN_MARK)
    images = [picture[-1].digest for picture in by_picture(prompt.media)]
    return {"prompt_id": prompt_id(prompt.messages, images), "prompt": json.loads(text)}


def _of_episode(text: str) -> dict[str, Any]:
    told = json.loads(text)
    images = map(bytes.fromhex, told.pop("images"))
    return {"prompt_id": prompt_id(told["prompt"], images), **told}


def _read(controller: Controller, config: Config, answers: Sequence[PromptAnswer]) -> dict[int, str]:
    """Sample -> the response's text or, of an episode, the JSON object of ReadEpisodes."""
    waiting: dict[int, Iterator[ReadTexts | ReadEpisodes]] = {
        replica: iter(_questions(config, answers, replica))
        for replica in dict.fromkeys(sample.replica for answer in answers for sample in answer.group.samples)
    }
    found: dict[int, str] = {}
    while asked := {replica: question for replica, left in waiting.items() if (question := next(left, None))}:
        done = controller.call(asked)
        for replica, question in asked.items():
            if replica in done:  # else it was lost
                found |= zip(question.samples, done[replica].texts, strict=True)
    return found


def _questions(config: Config, answers: Sequence[PromptAnswer], replica: int) -> Iterator[ReadTexts | ReadEpisodes]:
    """Commands that ask a replica for all of its responses, a limited number of tokens at a time."""
    for kind in (ReadTexts, ReadEpisodes):
        samples: list[int] = []
        num_tokens = 0
        for answer in answers:
            played = config.env_of(answer.prompt.domain) is not None
            for sample, size in zip(answer.group.samples, answer.sizes, strict=True):
                if sample.replica != replica or played != (kind is ReadEpisodes):
                    continue
                tokens = size.total if played else size.model
                if samples and (num_tokens + tokens > MAX_TOKENS or len(samples) == MAX_TEXTS):
                    yield kind(samples)
                    samples, num_tokens = [], 0
                samples.append(sample.id)
                num_tokens += tokens
        if samples:
            yield kind(samples)
