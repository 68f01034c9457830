"""Rows from responses: which are kept, worked out by hand, and that further training reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from hpcrl.config import DataConfig
from hpcrl.config.generating import GenerateConfig
from hpcrl.data import read_splits, sft_rows
from hpcrl.data.identity import prompt_id
from hpcrl.data.pairs import parse_pair
from hpcrl.data.response_rows import PromptRows, rows_of
from hpcrl.rollout.types import Prompt
from tests.metrics.test_responses import response

USER = {"role": "user", "content": "2+2?"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
SCORES = [0.5, 1.0, 0.0, 1.0, 0.5, 0.0]


def prompt(**more: Any) -> Prompt:
    return Prompt(3, "maths", 0, 3, (1,), "2+2?", answer="4", messages=[USER], **more)


def several(scores: list[float] = SCORES) -> list[dict[str, Any]]:
    return [response("maths", 3, n, score, response=f"r{n}", tokens=n + 1) for n, score in enumerate(scores)]


def made(responses: list[dict[str, Any]], scored: bool = True, **asked: Any) -> PromptRows:
    return rows_of(prompt(), responses, GenerateConfig(**asked), scored)


def said(rows: list[dict[str, Any]]) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows]


@pytest.mark.parametrize(
    ("asked", "kept", "dropped"),
    [
        ({}, "012345", {}),
        ({"min_score": 0.5}, "0134", {"below min_score": 2}),
        ({"keep": 1}, "1", {"not among the best": 5}),
        ({"keep": 3}, "013", {"not among the best": 3}),
        ({"min_score": 1.0, "keep": 3}, "13", {"below min_score": 4}),
        ({"min_score": 0.5, "keep": 1}, "1", {"below min_score": 2, "not among the best": 3}),
        ({"min_score": 1.5}, "", {"below min_score": 6}),
    ],
)
def test_the_best_are_kept_in_the_order_of_the_samples(asked: Any, kept: str, dropped: dict[str, int]) -> None:
    found = made(several(), **asked)
    assert said(found.rows) == [f"r{n}" for n in kept] and found.dropped == dropped
    assert len(found.rows) + sum(found.dropped.values()) == len(SCORES)


def test_each_response_is_dropped_for_one_reason() -> None:
    responses = several([1.0] * 7)
    responses[0] |= {"truncated": True, "error": "KeyError"}
    responses[1] |= {"truncated": True}
    responses[2] |= {"response": " \n"}
    responses[4] |= {"response": "r3", "score": 0.0}
    responses[5] |= {"response": "r1"}  # equal to one that is dropped
    found = made(responses)
    assert found.dropped == {"failed": 1, "truncated": 1, "empty": 1, "duplicate": 1}
    assert said(found.rows) == ["r3", "r1", "r6"]
    assert said(made(responses, truncated="keep").rows) == ["r1", "r3", "r6"]


def test_a_row_has_what_further_training_reads() -> None:
    extra = {"question": "2+2?", "chat_template_kwargs": {"thinking": False}, "response": "the reference"}
    (row,) = rows_of(prompt(tools=TOOLS, extra=extra), several([0.25]), GenerateConfig(), scored=True).rows
    assert row.pop("prompt_id") == prompt_id([USER])
    assert row == {
        "messages": [USER, {"role": "assistant", "content": "r0"}],
        "tag": "maths",
        "answer": "4",
        "tools": TOOLS,
        "chat_template_kwargs": {"thinking": False},
        "score": 0.25,
        "tokens": 1,
        "sample": 0,
    }
    assert "score" not in made(several([0.0]), scored=False).rows[0]


def episode(*turns: str, begin: tuple[dict[str, str], ...] = (USER,)) -> dict[str, Any]:
    messages = [{"role": "assistant" if n % 2 == 0 else "user", "content": turn} for n, turn in enumerate(turns)]
    return {"prompt": list(begin), "response": messages}


def test_an_episode_is_learned_from_turn_by_turn_but_not_its_examples(tokenizer: Any, write_jsonl: Any) -> None:
    begin = (USER, {"role": "assistant", "content": "example"}, USER)
    responses = [
        response("a", 0, 0, 1.0, **episode("go", "you went", "stop", "the end", begin=begin)),
        response("a", 0, 1, 1.0, **episode("go", "you went", "", begin=begin)),
        response("a", 0, 2, 1.0, prompt=list(begin), response=[]),
    ]
    found = made(responses)
    assert found.dropped == {"empty": 2}, "an empty turn cannot be learned from"
    (row,) = found.rows
    assert [message["content"] for message in row["messages"]][2:] == ["2+2?", "go", "you went", "stop"]
    ids, mask, _ = sft_rows(DataConfig(train=write_jsonl("rows.jsonl", row)), "train", tokenizer).row(0)
    learned = tokenizer.decode([token for token, wanted in zip(ids, mask, strict=True) if wanted])
    assert learned == "go<|im_end|>stop<|im_end|>"


@pytest.mark.parametrize(
    ("scores", "asked", "pair", "no_pair"),
    [
        (SCORES, {}, "12", ""),
        ([0.0, 0.5], {"min_score": 0.5}, "10", ""),
        ([0.0, 0.5], {"min_score": 0.75}, "", "best below min_score"),
        ([1.0, 1.0, 1.0], {}, "", "equal scores"),
        ([1.0], {}, "", "fewer than two responses"),
    ],
)
def test_a_pair_is_the_first_best_and_the_first_worst(
    scores: list[float], asked: Any, pair: str, no_pair: str, write_jsonl: Callable[..., str]
) -> None:
    found = made(several(scores), form="pairs", **asked)
    assert found.no_pair == no_pair and not found.dropped and len(found.rows) == bool(pair)
    for row in found.rows:
        assert [row[part][0]["content"] for part in ("chosen", "rejected")] == [f"r{n}" for n in pair]
        assert (row["score_chosen"], row["score_rejected"]) == (max(scores), min(scores))
        path = write_jsonl("pairs.jsonl", row)
        rows, wrong = read_splits(DataConfig(train=path), 0, read_train=parse_pair)
        read = rows["train"].row(0)
        assert not wrong and read.rejected is not None and read.turn is not None and read.rejected.turn is not None
        assert (read.messages, read.domain, read.turn["content"]) == ([USER], "maths", f"r{pair[0]}")
        assert read.rejected.turn["content"] == f"r{pair[1]}"


def test_a_pair_of_episodes_keeps_their_turns(tokenizer: Any, write_jsonl: Any) -> None:
    responses = [
        response("a", 0, n, float(n), **episode("go", "you went", turn)) for n, turn in enumerate(("left", "right"))
    ]
    (row,) = made(responses, form="pairs").rows
    assert json.loads(json.dumps(row)) == row
    sequences = sft_rows(DataConfig(train=write_jsonl("a.jsonl", row)), "train", tokenizer, kind="pairs").sequences(0)
    shown = [tokenizer.decode([i for i, wanted in zip(ids, mask, strict=True) if wanted]) for ids, mask, _ in sequences]
    assert shown == ["go<|im_end|>right<|im_end|>", "go<|im_end|>left<|im_end|>"]
