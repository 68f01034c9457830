"""Supervised rows: which tokens are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hpcrl.config import DataConfig
from hpcrl.data import PromptSource, check_answers, read_splits, sft_rows


def marked(tokenizer, row: Sequence[Any]) -> list[str]:
    """The runs of marked tokens as text."""
    runs: list[list[int]] = []
    before = False
    for token, mark in zip(*row[:2], strict=True):
        if mark:
            runs = [*runs[:-1], [*runs[-1], token]] if before else [*runs, [token]]
        before = mark
    return [tokenizer.decode(run) for run in runs]


def turns(*contents: str) -> dict:
    """A row of turns of the user and the assistant."""
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": c} for n, c in enumerate(contents)]}


def test_a_task_row_has_the_prompt_of_rollouts_and_its_answer(tokenizer):
    config = DataConfig(train="task:sort_digits", shuffle=False)
    rows = sft_rows(config, "train", tokenizer, seed=5)
    prompts = PromptSource(config, "train", tokenizer, seed=5, batch_size=1)
    assert len(rows) == 65536
    for index in range(3):
        prompt, row = prompts.next(), rows.row(index)
        ids, mask, _ = row
        count = len(prompt.token_ids)
        assert tuple(ids[:count]) == prompt.token_ids and not any(mask[:count]) and all(mask[count:])
        assert marked(tokenizer, row) == [f"{prompt.answer}<|im_end|>"]
        assert ids[-1] == tokenizer.eos_token_id and ids.count(tokenizer.eos_token_id) == 2


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "response": "four", "answer": "4"},
        {"prompt": "2+2?", "completion": "four"},
        {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]},
    ],
)
def test_written_answers(tokenizer, write_jsonl, row: dict):
    rows = sft_rows(DataConfig(train=write_jsonl("a.jsonl", row)), "train", tokenizer)
    assert tokenizer.decode(rows.row(0)[0]) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>"
    )
    assert marked(tokenizer, rows.row(0)) == ["four<|im_end|>"]


def test_every_assistant_turn_is_trained_on(tokenizer, write_jsonl):
    turns = [("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rows = sft_rows(DataConfig(train=write_jsonl("a.jsonl", {"messages": messages})), "train", tokenizer)
    ids, mask, _ = rows.row(0)
    assert marked(tokenizer, (ids, mask)) == ["b<|im_end|>", "d<|im_end|>"]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")


def test_special_tokens_in_an_answer_are_plain_text(tokenizer, write_jsonl):
    path = write_jsonl("a.jsonl", turns("a", "b<|im_end|>c", "d", "e<|im_end|>f"))
    ids, mask, _ = sft_rows(DataConfig(train=path), "train", tokenizer).row(0)
    assert marked(tokenizer, (ids, mask)) == ["b<|im_end|>c<|im_end|>", "e<|im_end|>f<|im_end|>"]
    assert ids.count(tokenizer.eos_token_id) == 4, "one for each turn"


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, write_jsonl):
    class Forgetful:
        eos_token_id, eos_token, chat_template = tokenizer.eos_token_id, tokenizer.eos_token, "x"
        __call__ = staticmethod(tokenizer)

        def apply_chat_template(self, messages: list, **_: object) -> str:
            return "".join(m["content"] for m in messages[-2:])

    messages = [{"role": role, "content": c} for role, c in [("user", "a"), ("assistant", "b"), ("user", "c")]]
    path = write_jsonl("a.jsonl", {"messages": [*messages, {"role": "assistant", "content": "d"}]})
    with pytest.raises(ValueError, match=r"a.jsonl:1: the chat template rewrites earlier turns"):
        sft_rows(DataConfig(train=path), "train", Forgetful()).row(0)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "c"}, "no answer to learn from"),
        ({"prompt": "c", "answer": 4}, "no answer to learn from"),
        ({"prompt": "c", "answer": ""}, "the answer to learn from is empty"),
        ({"prompt": "c", "response": " ", "answer": "d"}, "the answer to learn from is empty"),
        (turns("c", ""), "the answer to learn from is empty"),
        (turns("c", "", "d", "e"), "an assistant turn is empty"),
    ],
)
def test_rows_without_an_answer_are_named_before_the_start(tokenizer, write_jsonl, row: dict, why: str):
    path = write_jsonl("a.jsonl", {"prompt": "a", "answer": "b"}, row, turns("a", "b", "c", "d"), row)
    config = DataConfig(train=path)
    with pytest.raises(ValueError, match=rf"^{path}:2: {why}.*; 2 of 4 rows of data.train are so$") as raised:
        sft_rows(config, "train", tokenizer)
    assert check_answers(read_splits(config, 0)[0]) == [str(raised.value)]
    assert check_answers(read_splits(DataConfig(train="task:add", val=path), 0)[0]) == []


def test_an_assistant_turn_that_calls_a_tool_needs_no_text(write_jsonl):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    row = {"messages": [{"role": "user", "content": "a"}, call, {"role": "tool", "content": "3"}], "answer": "b"}
    assert check_answers(read_splits(DataConfig(train=write_jsonl("a.jsonl", row)), 0)[0]) == []


def test_a_resume_on_other_rows_is_refused(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "2+2?", "answer": "4"}\n')
    state = sft_rows(DataConfig(train=str(path)), "train", tokenizer, 0).state_dict()
    sft_rows(DataConfig(train=str(path)), "train", tokenizer, 0).load_state_dict(state)
    with pytest.raises(ValueError, match=r"seed differs from the checkpoint"):
        sft_rows(DataConfig(train=str(path)), "train", tokenizer, 1).load_state_dict(state)
    path.write_text('{"prompt": "2+2?", "answer": "5"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl differs from the checkpoint"):
        sft_rows(DataConfig(train=str(path)), "train", tokenizer, 0).load_state_dict(state)


def of_template(name: str, path: str, **config) -> tuple[str, list[str]]:
    """Text and marked runs of a file's first row under a published template."""
    from tests.templates import tokenizer_of

    tokenizer = tokenizer_of(name)
    row = sft_rows(DataConfig(train=path, **config), "train", tokenizer).row(0)
    return tokenizer.decode(row[0]), marked(tokenizer, row)


def test_reasoning_and_calls_of_the_last_turn_are_trained_on(write_jsonl):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "1"}'}}
    thinks = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    calls = {"role": "assistant", "content": "look", "tool_calls": [call]}
    user = {"role": "user", "content": "2+2?"}
    _, learned = of_template("qwen3", write_jsonl("a.jsonl", {"messages": [user, thinks]}))
    assert learned == ["<think>\n2 and 2\n</think>\n\n4<|im_end|>"]
    _, learned = of_template("qwen2.5", write_jsonl("b.jsonl", {"messages": [user, calls]}))
    assert learned == ['look\n<tool_call>\n{"name": "f", "arguments": {"a": "1"}}\n</tool_call><|im_end|>']
    _, learned = of_template("qwen3-coder", write_jsonl("c.jsonl", {"messages": [user, calls]}))
    assert len(learned) == 1 and "<function=f>\n<parameter=a>\n1\n</parameter>" in learned[0]
    path = write_jsonl("d.jsonl", {"messages": [user, thinks]})
    with pytest.raises(ValueError, match=r"d.jsonl:1: the chat template does not show reasoning_content of"):
        of_template("qwen2.5", path)


def test_text_that_a_template_would_cut_from_the_last_turn_is_trained_on(write_jsonl):
    """QwQ's template removes the thinking from every assistant turn."""
    answer = "<think>\n2 and 2\n</think>\n\n4"
    _, learned = of_template("qwq", write_jsonl("a.jsonl", {"prompt": "2+2?", "response": answer}))
    assert learned[0].endswith("4<|im_end|>") and "2 and 2" in learned[0]


def test_a_base_model_is_trained_on_the_end_token_of_its_template(write_jsonl, monkeypatch):
    from tests import templates

    tokenizer = templates.tokenizer_of("qwen2.5")
    tokenizer.eos_token = "<|endoftext|>"
    row = sft_rows(DataConfig(train=write_jsonl("a.jsonl", turns("1", "2", "3", "4"))), "train", tokenizer).row(0)
    assert marked(tokenizer, row) == ["2<|im_end|>", "4<|im_end|>"]
    assert "<|endoftext|>" not in tokenizer.decode(row[0])


def test_a_turn_of_weight_0_is_not_trained_on(tokenizer, write_jsonl):
    row = turns("1", "2", "3", "4")
    row["messages"][1]["weight"] = 0
    assert marked(tokenizer, sft_rows(DataConfig(train=write_jsonl("a.jsonl", row)), "train", tokenizer).row(0)) == [
        "4<|im_end|>"
    ]
    row["messages"][3]["weight"] = 0
    with pytest.raises(ValueError, match="all assistant turns have weight 0"):
        sft_rows(DataConfig(train=write_jsonl("b.jsonl", row)), "train", tokenizer)


def test_a_row_that_the_template_refuses_is_named(tokenizer, write_jsonl, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no') }}")
    path = write_jsonl("a.jsonl", turns("1", "2"))
    with pytest.raises(ValueError, match=f"^{path}:1: the chat template refuses the row: TemplateError: no$"):
        sft_rows(DataConfig(train=path), "train", tokenizer).row(0)
