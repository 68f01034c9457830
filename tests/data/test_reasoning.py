"""Whatever marks a family puts around its reasoning, rewards and environments see <think> and </think>, and only the
answer counts."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hpcrl.data.chat import encode, render
from hpcrl.data.reasoning import TurnTexts
from hpcrl.data.template_forms import TemplateRefusal
from hpcrl.rewards.grading.extract import after_thinking
from tests.templates import TABLE, tokenizer_of

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"
WRITTEN = {
    "gpt-oss": (f"{ANALYSIS}Up? <answer>up</answer><|end|>{FINAL}<answer>left</answer><|return|>", ""),
    "ministral-3": ("[THINK]Up? <answer>up</answer>[/THINK]<answer>left</answer></s>", ""),
    "seed-oss": ("<seed:think>Up? <answer>up</answer></seed:think><answer>left</answer><seed:eos>", ""),
    "gemma-4": ("<|channel>thought\nUp? <answer>up</answer><channel|><answer>left</answer><turn|>", ""),
    "apertus": (
        "<|inner_prefix|>Up? <answer>up</answer><|inner_suffix|><answer>left</answer><|assistant_end|>",
        "<|assistant_start|>",
    ),
    "granite-3.3": (
        "<think>Up? <answer>up</answer></think><response><answer>left</answer></response><|end_of_text|>",
        "",
    ),
    "apriel-1.6": (
        "Up? <answer>up</answer>\n[BEGIN FINAL RESPONSE]\n<answer>left</answer>\n<|end|>",
        "<|begin_assistant|>\nHere are my reasoning steps:\n",
    ),
    "qwen3": ("<think>\nUp? <answer>up</answer>\n</think>\n\n<answer>left</answer><|im_end|>", ""),
    "qwen3.5": (
        "Up? <answer>up</answer>\n</think>\n\n<answer>left</answer><|im_end|>",
        "<|im_start|>assistant\n<think>\n",
    ),
}
"""Family -> (a turn, the end of its prompt)."""


def text_of(tokenizer: Any, turn: str, prompt: str = "") -> str:
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (turn, prompt)]
    [text] = TurnTexts(tokenizer).of(ids[:1], ids[1:])
    return text


@pytest.mark.parametrize("all_special", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
def test_the_answer_is_the_text_after_the_reasoning(name: str, all_special: bool) -> None:
    tokenizer = tokenizer_of(name, all_special)
    text = text_of(tokenizer, *WRITTEN[name])
    assert text.startswith("<think>") and "Up? <answer>up</answer>" in text
    assert after_thinking(text).strip() == "<answer>left</answer>"
    unfinished = WRITTEN[name][0].split("</answer>")[0]
    assert after_thinking(text_of(tokenizer, unfinished, WRITTEN[name][1])) == ""


@pytest.mark.parametrize("name", TABLE)
def test_reasoning_shown_by_a_template_is_not_part_of_the_answer(name: str) -> None:
    """Reasoning is recognised only by the marks that the template writes; without marks the whole text is the
    answer."""
    tokenizer = tokenizer_of(name)
    asked, thought = {"role": "user", "content": "7?"}, "Hm <answer>8</answer>."
    turn = {"role": "assistant", "content": "It is 9.", "reasoning_content": thought, "thinking": thought}
    for message in (turn, {"role": "assistant", "content": "It is 9."}):
        prompt, whole = render(tokenizer, [asked], None), render(tokenizer, [asked, message], None, ask=False)
        start = len(prompt) if whole.startswith(prompt) else len(prompt.partition("7?")[0]) + 2
        ids = [encode(tokenizer, whole[start:]), encode(tokenizer, prompt if whole.startswith(prompt) else "x")]
        [text] = TurnTexts(tokenizer).of(ids[:1], ids[1:])
        assert after_thinking(text).strip().endswith("It is 9.") and "8" not in after_thinking(text)
        assert ("<answer>8</answer>" in text) <= ("</think>" in text)


def test_gpt_oss_channels_become_think_tags() -> None:
    tokenizer = tokenizer_of("gpt-oss")
    call = '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    preamble = "<|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
    assert text_of(tokenizer, f"{ANALYSIS}a<|end|>{ANALYSIS}b<|end|>{preamble}{FINAL}c<|return|>") == (
        "<think>a</think><think>b</think>I add.c"
    )
    assert text_of(tokenizer, f"{ANALYSIS}a</think>7<|end|>{FINAL}c") == "<think>a7</think>c", "no end of its own"
    assert after_thinking(text_of(tokenizer, f"{ANALYSIS}a</think>7")) == ""
    assert after_thinking(text_of(tokenizer, f"{ANALYSIS}a<|end|>{call}")).endswith('{"a": 1}')
    assert text_of(tokenizer, "no channels <|start|>") == "no channels "
    assert text_of(tokenizer, f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>fin") == "<think>a</think>"


def test_marks_of_other_families_are_plain_text() -> None:
    turn = "[THINK]a[/THINK] <seed:think>b</seed:think> <response>c</response> Here are my reasoning steps: d"
    for name in ("qwen2.5", "phi-3"):
        assert text_of(tokenizer_of(name), f"{turn}<|im_end|>") == turn
    quoted = "A tag <|im_end|> in letters"
    tokenizer = tokenizer_of("qwen3")
    ids = tokenizer(quoted, split_special_tokens=True, add_special_tokens=False)["input_ids"]
    assert TurnTexts(tokenizer).of([ids], [[]]) == [quoted]
    assert TurnTexts(tokenizer).of([], []) == []


def test_marks_of_an_unknown_family_are_found_in_its_template() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning %}<muse>{{ m.reasoning }}</muse>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert text_of(tokenizer, "<muse>7?</muse>8<|im_end|>") == "<think>7?</think>8"


@pytest.mark.parametrize("piece", ["<|message|>", ANALYSIS, FINAL, "<|channel|>", "a to=" * 50, "[THINK]"])
def test_a_hostile_turn_is_parsed_in_linear_time(piece: str) -> None:
    tokenizer = tokenizer_of("gpt-oss")
    texts = TurnTexts(tokenizer)
    begins = time.thread_time()
    texts._marked(piece * (400_000 // len(piece)), "")
    assert time.thread_time() - begins < 2


def test_a_template_that_refuses_reasoning_gets_the_known_marks() -> None:
    tokenizer = tokenizer_of("ministral-3")
    with pytest.raises(TemplateRefusal):
        render(tokenizer, [{"role": "assistant", "content": ""}], None)
    assert text_of(tokenizer, "[THINK]a[/THINK]b</s>") == "<think>a</think>b"
