"""Turns written as messages: supervised training learns the text that the model wrote, for published templates."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from hpcrl.config import DataConfig
from hpcrl.config.generating import GenerateConfig
from hpcrl.data import sft_rows
from hpcrl.data.chat import encode, render
from hpcrl.data.reasoning import TurnTexts
from hpcrl.data.response_rows import rows_of
from hpcrl.data.written_turns import WrittenTurns
from hpcrl.rollout.types import Prompt
from tests.metrics.test_responses import response
from tests.templates import tokenizer_of

USER = {"role": "user", "content": "2+2?"}
WRITTEN = {
    "qwen3": "<think>\nWhy?\n</think>\n\nIt is 4.<|im_end|>",
    "qwen3.5": "Why?\n</think>\n\nIt is 4.<|im_end|>",
    "deepseek-r1": "Why?\n</think>\n\nIt is 4.<\uff5cend\u2581of\u2581sentence\uff5c>",
    "minimax-m2": "Why?\n</think>\n\nIt is 4.[e~[",
    "glm-4.5": "\n<think>Why?</think>\nIt is 4.<|endoftext|>",
    "seed-oss": "<seed:think>Why?</seed:think>It is 4.<seed:eos>",
    "gpt-oss": (
        "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>final<|message|>It is 4.<|return|>"
    ),
    "qwen2.5": "It is 4.<|im_end|>",
}
"""Template -> a turn as its model writes it after the prompt."""


@pytest.mark.parametrize("name", WRITTEN)
def test_training_learns_what_the_model_wrote(name: str, write_jsonl: Any) -> None:
    """From the tokens of the generation to those of pipeline=sft, up to white space, which templates trim."""
    tokenizer, written = tokenizer_of(name), WRITTEN[name]
    prompt = encode(tokenizer, render(tokenizer, [USER], None))
    ids = encode(tokenizer, written, begins=False)
    [text] = TurnTexts(tokenizer).of([ids[:-1]], [prompt])
    assert ("<think>" in text) == ("Why?" in written) and text.endswith("It is 4.")
    made = rows_of(
        Prompt(0, "a", 0, 0, (), "", messages=[USER]),
        [response("a", 0, 0, 1.0, response=text)],
        GenerateConfig(),
        True,
        WrittenTurns(tokenizer).message,
    )
    found, mask, _ = sft_rows(DataConfig(train=write_jsonl("a.jsonl", *made.rows)), "train", tokenizer).row(0)
    learned = [token for token, wanted in zip(found, mask, strict=True) if wanted]
    assert found[: len(prompt)] == prompt
    assert "".join(tokenizer.decode(learned).split()) == "".join(tokenizer.decode(ids).split())


def test_reasoning_that_no_form_shows_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    turns = WrittenTurns(tokenizer_of("ministral-3"))
    with caplog.at_level(logging.WARNING):
        assert turns.message("plain") == {"role": "assistant", "content": "plain"} and not caplog.records
        for _ in range(2):
            assert turns.message("<think>a</think>b")["content"] == "<think>a</think>b"
    assert len(caplog.records) == 1 and "shows reasoning in no form" in caplog.text


@pytest.mark.parametrize("name", ["qwen3.5", "deepseek-r1", "seed-oss"])
def test_reasoning_without_an_end_stays_text(name: str) -> None:
    message = WrittenTurns(tokenizer_of(name)).message("<think>\nnever ends")
    assert message["content"].endswith("never ends") and message.keys() == {"role", "content"}
