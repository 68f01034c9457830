"""Rows to train on from a model's responses to a prompt: which ones are kept, and in which form (pipeline=generate)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hpcrl.config.generating import GenerateConfig
from hpcrl.data.identity import prompt_id
from hpcrl.data.messages import Messages, one_turn
from hpcrl.data.rows import VARIABLES_KEY
from hpcrl.rollout.types import Prompt

ResponseOf = Mapping[str, Any]
"""A response with `response` (text, or the messages of an episode, then also `prompt`), `score`, `tokens`, `sample`,
`truncated` and `error` (hpcrl.metrics.responses)."""
Write = Callable[[str], dict[str, Any]]
FAILED, TRUNCATED, EMPTY, DUPLICATE = "failed", "truncated", "empty", "duplicate"
LOW, NOT_BEST = "below min_score", "not among the best"
"""Why a response has no row."""
TOO_FEW, EQUAL, WORSE = "fewer than two responses", "equal scores", "best below min_score"
"""Why a prompt has no pair."""


class PromptRows(NamedTuple):
    """The rows of a prompt, in order of its responses, the number of responses dropped for each reason, and why the
    prompt has no pair, empty if it has one or rows are answers."""

    rows: list[dict[str, Any]]
    dropped: dict[str, int]
    no_pair: str = ""


def rows_of(
    prompt: Prompt,
    responses: Sequence[ResponseOf],
    asked: GenerateConfig,
    scored: bool,
    write: Write = one_turn,
) -> PromptRows:
    """The rows of a prompt as `asked`.

    Args:
        scored: Whether the prompt has a reward, whose scores the rows then show.
        write: The message of a turn with this text (WrittenTurns.message).
    """
    dropped: Counter[str] = Counter()
    usable: list[ResponseOf] = []
    known: set[str] = set()
    for response in responses:
        text = json.dumps(response["response"], sort_keys=True)
        if reason := _obstacle(response, asked) or (DUPLICATE if text in known else ""):
            dropped[reason] += 1
        else:
            usable.append(response)
            known.add(text)
    if asked.form == "pairs":
        row, no_pair = _pair(prompt, usable, asked, write)
        return PromptRows([row] if row is not None else [], dict(dropped), no_pair)
    good = [each for each in usable if asked.min_score is None or each["score"] >= asked.min_score]
    best = sorted(good, key=lambda each: -float(each["score"]))[: asked.keep]  # the first ones of equal scores
    dropped += Counter({LOW: len(usable) - len(good), NOT_BEST: len(good) - len(best)})
    kept = sorted(best, key=lambda each: int(each["sample"]))
    return PromptRows([_answer(prompt, response, scored, write) for response in kept], dict(dropped))


def _obstacle(response: ResponseOf, asked: GenerateConfig) -> str:
    """Why a response cannot be learned from, whatever its score."""
    if response["error"] is not None:
        return FAILED
    if response["truncated"] and asked.truncated == "drop":
        return TRUNCATED
    turns = [turn for turn in _messages(response, one_turn) if turn["role"] == "assistant"]
    said = [turn.get("tool_calls") or (turn.get("content") or "").strip() for turn in turns]
    return "" if said and all(said) else EMPTY


def _answer(prompt: Prompt, response: ResponseOf, scored: bool, write: Write) -> dict[str, Any]:
    """A row of pipeline=sft. Assistant turns of the prompt are not the model's, such as examples: their weight is 0."""
    asked = _messages_before(prompt, response)
    before = [{**each, "weight": 0} if each["role"] == "assistant" else each for each in asked]
    score = {"score": response["score"]} if scored else {}
    row = {"messages": [*before, *_messages(response, write)], **_columns(prompt), **score}
    return {**row, "tokens": response["tokens"], "sample": response["sample"]}


def _pair(
    prompt: Prompt, usable: Sequence[ResponseOf], asked: GenerateConfig, write: Write
) -> tuple[dict[str, Any] | None, str]:
    """A row of hpcrl.data.pairs, or why there is none."""
    if len(usable) < 2:
        return None, TOO_FEW
    ranked = sorted(usable, key=lambda each: -float(each["score"]))
    best, worst = ranked[0], next(each for each in ranked if each["score"] == ranked[-1]["score"])
    if best["score"] == worst["score"]:
        return None, EQUAL
    if asked.min_score is not None and best["score"] < asked.min_score:
        return None, WORSE
    named = (("chosen", best), ("rejected", worst))
    parts = {"prompt": _messages_before(prompt, best), **{name: _messages(each, write) for name, each in named}}
    further = {f"{key}_{name}": response[key] for key in ("score", "tokens") for name, response in named}
    return {**parts, **_columns(prompt), **further}, ""


def _messages_before(prompt: Prompt, response: ResponseOf) -> Messages:
    """The messages before the model's first turn; an environment may have replaced the row's own."""
    return list(prompt.messages if isinstance(response["response"], str) else response["prompt"])


def _messages(response: ResponseOf, write: Write) -> Messages:
    """The model's turns, and in an episode what the environment said between them."""
    given = response["response"]
    if isinstance(given, str):
        return [write(given)]
    last = max((place for place, each in enumerate(given) if each["role"] == "assistant"), default=-1)
    return [{**each, **write(each["content"])} if _is_text(each) else each for each in given[: last + 1]]


def _is_text(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and isinstance(message.get("content"), str)


def _columns(prompt: Prompt) -> dict[str, Any]:
    """What further training reads, under the names that hpcrl looks for by default."""
    variables = prompt.extra.get(VARIABLES_KEY)
    found = {"tag": prompt.domain, "answer": prompt.answer, "tools": prompt.tools, VARIABLES_KEY: variables}
    known = {name: value for name, value in found.items() if value is not None}
    return {**known, "prompt_id": prompt_id(prompt.messages)}
