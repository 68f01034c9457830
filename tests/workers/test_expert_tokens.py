"""The tokens of an expert's turn, for published chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.config import DataConfig
from hpcrl.data import sft_rows
from hpcrl.data.chat import encode, render
from hpcrl.workers.expert_tokens import ExpertTokens
from tests.templates import tokenizer_of

USER = {"role": "user", "content": "Where?"}


@pytest.mark.parametrize(
    ("template", "turn"),
    [
        ("qwen2.5", "Up<|im_end|>"),
        ("qwen3", "<think>\n\n</think>\n\nUp<|im_end|>"),
        ("qwen3.5", "\n</think>\n\nUp<|im_end|>"),
        ("glm-4.5", "\n<think></think>\nUp<|endoftext|>"),
        ("gpt-oss", "<|channel|>final<|message|>Up<|return|>"),
        ("smolvlm", " Up<end_of_utterance>"),
        ("laguna-xs.2", "\nUp\n</assistant>"),
        ("functionary-3.2", "all\nUp<|eot_id|>"),
    ],
)
def test_the_turn_is_what_supervised_training_learns(template: str, turn: str, tmp_path: Path) -> None:
    tokenizer, file = tokenizer_of(template), tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": [USER, {"role": "assistant", "content": "Up"}]}) + "\n")
    row = sft_rows(DataConfig(train=str(file)), "train", tokenizer).row(0)
    begins = row.loss_mask.index(True)
    ids = ExpertTokens(tokenizer).of("Up", row.token_ids[:begins]).tolist()
    assert ids == row.token_ids[begins:] and tokenizer.decode(ids) == turn


def test_the_turn_follows_the_reasoning_of_its_own_prompt() -> None:
    """A row's template variables may end the prompt in another way than the template does by default."""
    tokenizer = tokenizer_of("qwen3")
    ended = encode(tokenizer, render(tokenizer, [USER], None, enable_thinking=False))
    assert tokenizer.decode(ended).endswith("<think>\n\n</think>\n\n")
    assert tokenizer.decode(ExpertTokens(tokenizer).of("Up", ended)) == "Up<|im_end|>"


def test_a_template_that_rewrites_its_prompt_gets_only_the_end_of_the_reasoning() -> None:
    tokenizer = tokenizer_of("deepseek-r1")
    asked = encode(tokenizer, render(tokenizer, [USER], None))
    assert tokenizer.decode(asked).endswith("<think>\n")
    assert tokenizer.decode(ExpertTokens(tokenizer).of("Up", asked)).startswith("\n</think>\n\nUp")
