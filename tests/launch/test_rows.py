"""Rows before the start: refusals by a chat template are named, and the plan shows a prompt as the model gets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import ConfigError
from hpcrl.launch.plan import describe
from hpcrl.launch.prepare import prepare
from tests.templates import TABLE
from tests.test_launch import write_model

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
STRICT = """\
{%- for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture
def at(tmp_path: Path) -> Path:
    """A folder with a model under a strict template."""
    with_template(write_model(tmp_path / "model"), STRICT)
    return tmp_path


def with_template(model: Path, template: str, eos: str = "<|im_end|>") -> Path:
    tokens = {str(n): {"content": text, "special": True} for n, text in enumerate(("<|endoftext|>", "<|im_end|>"))}
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "added_tokens_decoder": tokens}))
    (model / "chat_template.jinja").write_text(template)
    return model


def words(at: Path, *more: str) -> list[str]:
    known = ["cluster=local", "dry_run=true", "reward.default.name=exact_match", "data.max_prompt_tokens=8"]
    return [*known, "rollout.max_new_tokens=8", f"model.path={at}/model", f"run_dir={at}/run", *more]


def write(at: Path, *rows: Any, name: str = "rows.jsonl") -> str:
    (at / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{at / name}"


def refused(at: Path, *more: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        prepare(words(at, *more))
    return raised.value.problems


def plan(at: Path, *more: str) -> str:
    return describe(*prepare(words(at, *more)))


GOOD = {"messages": [USER], "answer": "4"}
TWICE = {"messages": [USER, USER], "answer": "4"}
REFUSES = "the chat template refuses the row: TemplateError: roles must alternate"


def test_a_row_that_the_template_refuses_is_named(at: Path):
    path, other = write(at, GOOD, TWICE, GOOD, TWICE), write(at, TWICE, name="val.jsonl")
    assert refused(at, f"data.train={path}", f"data.val={other}") == [
        f"{path}:2: {REFUSES}",
        f"{path}:4: {REFUSES}",
        f"{other}:1: {REFUSES}",
    ]
    dialogue = {"messages": [USER, USER, ANSWER]}
    sft = ["pipeline=sft", "~reward", f"data.train={write(at, {'messages': [USER, ANSWER]}, dialogue)}"]
    assert refused(at, *sft) == [f"{path}:2: {REFUSES}"]
    agentic = ["pipeline=agentic", "env.default.name=lake", f"data.train={write(at, GOOD, TWICE)}"]
    assert f"{path}:2: {REFUSES}" in refused(at, *agentic)


def test_any_exception_of_a_template_is_reported_for_its_row(at: Path):
    with_template(at / "model", "{{ 1 // (messages[0].content | length - 1) }}")
    path = write(at, GOOD, {"prompt": "x", "answer": "4"})
    (problem,) = refused(at, f"data.train={path}")
    assert problem.startswith(f"{path}:2: the chat template refuses the row: ZeroDivisionError: ")
    with_template(at / "model", "{% for x in messages %}")
    (problem,) = refused(at, f"data.train={path}")
    assert problem.startswith(f"model.path: the chat template of {at}/model is not valid: ")


@pytest.mark.parametrize("train", ["task:add", "rows"])
def test_a_system_prompt_that_the_template_refuses_is_named_once(at: Path, train: str):
    train = train if train == "task:add" else write(at, GOOD, GOOD, TWICE)
    problems = refused(at, f"data.train={train}", "data.val=task:sort_digits", "data.system_prompt=Be brief.")
    assert problems[0] == (
        f"data.system_prompt: the chat template of {at}/model refuses a system message (TemplateError: no system role)"
        "; leave it unset, or write the text into the prompts"
    )
    assert problems[1:] == ([] if train == "task:add" else [f"{train}:3: {REFUSES}"])


def test_an_empty_system_prompt_replaces_the_default_one(at: Path):
    """It replaces the template's default."""
    with_template(at / "model", TABLE["qwen2.5"].template)
    path = write(at, GOOD)
    assert "You are Qwen" in plan(at, f"data.train={path}")
    assert 'example "<|im_start|>system\\n<|im_end|>\\n<|im_start|>user' in plan(
        at, f"data.train={path}", "data.system_prompt="
    )


def test_template_variables_are_passed_on_or_refused(at: Path):
    with_template(at / "model", TABLE["qwen3"].template)
    own = {**GOOD, "chat_template_kwargs": {"enable_thinking": True}}
    path = write(at, GOOD, own)
    off = "data.chat_template_kwargs={enable_thinking: false}"
    closed = '<think>\\n\\n</think>\\n\\n"\n'
    assert closed in plan(at, f"data.train={path}", off)
    assert closed not in plan(at, f"data.train={path}")
    assert closed not in plan(at, f"data.train={write(at, own)}", off), "the row's own win"
    (problem,) = refused(at, "data.chat_template_kwargs={enable_thinkin: false}", "data.train=task:add")
    assert problem.startswith("data.chat_template_kwargs.enable_thinkin: the chat template of ")
    assert "reads no variable of this name; did you mean enable_thinking? (override" in problem
    (problem,) = refused(at, "data.chat_template_kwargs={tokenize: true}", "data.train=task:add")
    assert "variables of a chat template, and tokenize is not one" in problem
    agentic = ["pipeline=agentic", "env.default.name=lake", f"data.train={path}"]
    (problem,) = (line for line in refused(at, *agentic) if "chat_template_kwargs" in line)
    assert problem.startswith(f"{path}:1: a row's chat_template_kwargs apply only to single responses")


def test_a_last_turn_that_the_template_omits_is_refused(at: Path):
    path = write(at, {"messages": [USER, {**ANSWER, "reasoning_content": "2 and 2"}]})
    sft = ["pipeline=sft", "~reward", f"data.train={path}"]
    (problem,) = refused(at, *sft)
    assert problem.startswith(f"{path}:1: the chat template does not show reasoning_content of the last turn")
    with_template(at / "model", TABLE["qwen3"].template)
    assert 'trained on: "<think>\\n2 and 2\\n</think>\\n\\n4<|im_end|>"' in plan(at, *sft)


def test_rows_skipped_by_a_supervised_run_are_counted(at: Path):
    with_template(at / "model", TABLE["qwen3"].template)
    turns = [USER, {**ANSWER, "content": "<think>\na\n</think>\n\n4"}, USER, ANSWER]
    path = write(at, {"messages": [USER, ANSWER]}, {"messages": turns}, {"messages": turns})
    text = plan(at, "pipeline=sft", "~reward", f"data.train={path}")
    assert f"note: {path}:2: the chat template rewrites earlier turns" in text
    assert "; 2 rows of data.train are skipped for this reason" in text


def test_the_plan_counts_rows_and_shows_a_rendered_prompt(at: Path):
    for n in range(3):
        write(at, *[GOOD] * (n + 1), name=f"part-{n}.jsonl")
    long = write(at, {"prompt": "a" * 500 + "?", "answer": "4"}, name="long.jsonl")
    text = plan(at, f"data.train={at}/part-*.jsonl", f"data.val={long}")
    assert f"data    train {at}/part-*.jsonl (6 rows in 3 files: 1 + 2 + 3)\n" in text
    assert f"        validation {long} (1 row)\n" in text
    assert 'example "<|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n"\n' in text
    text = plan(at, f"data.train={long}")
    (example,) = (line for line in text.splitlines() if line.startswith("example"))
    assert "aaa [... 211 characters ...] aaa" in example and len(example) < 420
    assert "no chat template" not in text
    (at / "model" / "chat_template.jinja").unlink()
    text = plan(at, f"data.train={at}/part-0.jsonl")
    assert f"note: {at}/model has no chat template: the model gets the texts of a row's messages" in text
    assert 'example "2+2?"\n' in text


def test_the_plan_reports_differing_end_tokens(at: Path):
    """A base model: tokenizer and config end with <|endoftext|>, the template ends turns with <|im_end|>."""
    path, model = write(at, {"messages": [USER, ANSWER]}), at / "model"
    sft = ["pipeline=sft", "~reward", f"data.train={path}"]
    (model / "generation_config.json").write_text('{"eos_token_id": [1]}')
    assert "name different end tokens" not in plan(at, *sft)
    with_template(model, STRICT, eos="<|endoftext|>")
    (model / "generation_config.json").write_text('{"eos_token_id": 0}')
    text = plan(at, *sft)
    assert (
        f"note: the files of {model} name different end tokens (generation_config.json <|endoftext|>; tokenizer "
        "<|endoftext|>; chat template <|im_end|>): generation stops at each of them, and answers are trained with "
        "<|im_end|>" in text
    )
    assert 'trained on: "4<|im_end|>"' in text
