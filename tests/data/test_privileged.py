"""Prompts that only a teacher reads: what the template makes of a row, rows that lack its values, long ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hpcrl.config import DataConfig, parse
from hpcrl.config.teacher import TeacherConfig
from hpcrl.data import PromptSource, parse_row
from hpcrl.data.files import BadRow
from hpcrl.data.privileged import PrivilegedContext, with_context_check
from hpcrl.data.rows import RawContext, Row, read_splits
from hpcrl.spec.media import IMAGE_MARK
from tests.vlm import png, seeing_tokenizer

ALL = PrivilegedContext("{prompt}\nThe answer is \\boxed{{{answer}}}, \\boxed{}.\nHint: {hint} {{prompt}}", 100)
ANSWER = PrivilegedContext("{prompt} ({answer})", 100)


def row_of(raw: dict[str, Any]) -> Row:
    return parse_row(raw, RawContext(DataConfig(), "rows.jsonl:7"))


def test_the_last_user_message_becomes_the_template() -> None:
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "{answer} of 1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And {x} 2+2?"},
    ]
    row = row_of({"messages": said, "label": 4, "hint": ["two", {"é": 2}]})
    wanted = 'And {x} 2+2?\nThe answer is \\boxed{4}, \\boxed{}.\nHint: ["two", {"é": 2}] {prompt}'
    assert ALL.messages(row, "") == [*said[:3], {"role": "user", "content": wanted}]
    assert row.messages == said


@pytest.mark.parametrize("given", [{}, {"hint": None}, {"hint": " "}])
def test_a_row_without_a_value_is_refused_with_its_place(given: dict[str, Any]) -> None:
    with pytest.raises(BadRow, match=r"^rows\.jsonl:7: no hint, which teacher\.context reads; the row has answer"):
        ALL.messages(row_of({"prompt": "1+1?", "answer": "2", **given}), "rows.jsonl:7")


def test_a_template_without_the_prompt_is_refused() -> None:
    for text in ("The answer is {answer}", "{{prompt}}", ""):
        with pytest.raises(ValidationError, match=r"expected a text with \{prompt\}"):
            TeacherConfig(context=text)


def test_a_source_encodes_what_the_teacher_reads(tokenizer: Any, write_jsonl: Any) -> None:
    path = write_jsonl("a.jsonl", {"question": "2+2?", "answer": "<|im_end|> 4"})
    prompt = PromptSource(DataConfig(train=path), "train", tokenizer, 0, 1, ANSWER).next()
    alone = PromptSource(DataConfig(train=path), "train", tokenizer, 0, 1).next()
    assert prompt.token_ids == alone.token_ids and alone.teacher_ids == ()
    text = tokenizer.decode(prompt.teacher_ids)
    assert text == "<|im_start|>user\n2+2? (<|im_end|> 4)<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.teacher_ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1, "an answer ends no message"


def test_images_stay_in_the_prompt(write_jsonl: Any, tmp_path: Path) -> None:
    """Each once, at its place in the message; a column cannot add a place."""
    names = [f"{colour}.png" for colour in (10, 200)]
    for name, colour in zip(names, (10, 200), strict=True):
        (tmp_path / name).write_bytes(png(colour, 28, 56))
    raw = {"prompt": "a <image> or <image>?", "images": names, "answer": f"b{IMAGE_MARK}"}
    path = write_jsonl("a.jsonl", raw)
    prompt = PromptSource(DataConfig(train=path), "train", seeing_tokenizer(), 0, 1, ANSWER).next()
    image = "<|vision_start|>" + 2 * "<|image_pad|>" + "<|vision_end|>"
    said = f"<|im_start|>user\na {image} or {image}? (b)<|im_end|>\n<|im_start|>assistant\n"
    assert seeing_tokenizer().decode(prompt.teacher_ids) == said
    assert seeing_tokenizer().decode(prompt.token_ids) == said.replace(" (b)", "") and len(prompt.media) == 2
    twice = PrivilegedContext("{prompt} {prompt}", 100)
    with pytest.raises(
        BadRow, match=r"^rows\.jsonl:7: the message has images, which teacher\.context would repeat; give"
    ):
        twice.messages(parse_row(raw, RawContext(DataConfig(), "rows.jsonl:7", folder=tmp_path)), "rows.jsonl:7")


def test_long_ones_are_dropped_and_counted_and_a_cursor_has_them(tokenizer: Any, write_jsonl: Any) -> None:
    rows = [{"prompt": str(n), "answer": "x" * (40 if n % 2 else 1)} for n in range(6)]
    config = DataConfig(train=write_jsonl("a.jsonl", *rows), shuffle=False, max_prompt_tokens=30)
    context = PrivilegedContext("{prompt} {answer}", 30)

    def source() -> PromptSource:
        return PromptSource(config, "train", tokenizer, 0, 1, context)

    drawn = source()
    assert [drawn.next().row for _ in range(3)] == [0, 2, 4]
    (first, *_) = dropped = drawn.take_dropped()
    assert len(dropped) == 2 and first.outcome == "too_long" and first.reason.endswith(" tokens with teacher.context")
    resumed = source()
    resumed.load_state_dict(json.loads(json.dumps(drawn.state_dict())))
    uid = next(iter(resumed.ledger.open_uids))
    assert resumed.prompt(uid).teacher_ids == drawn.prompt(uid).teacher_ids != ()
    refusing = config.model_copy(update={"overlong_prompts": "error"})
    drawn = PromptSource(refusing, "train", tokenizer, 0, 1, context)
    drawn.next()
    with pytest.raises(
        ValueError, match=r"a\.jsonl:2: the prompt has \d+ tokens with .*teacher\.max_prompt_tokens=30 \(data\.overlong"
    ):
        drawn.next()
    with pytest.raises(ValueError, match=r"all 6 prompts have more than .*teacher\.max_prompt_tokens=3 tokens; raise"):
        PromptSource(config, "train", tokenizer, 0, 1, PrivilegedContext("{prompt} {answer}", 3))


def test_a_launch_names_the_first_row_that_lacks_a_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(n), "hint": "h" if n < 3 else None}) + "\n" for n in range(5)))
    data = {"train": str(path), "val": str(path)}
    config = parse({"pipeline": "distill", "model": {"path": "m"}, "teacher": {"path": "t"}, "data": data})
    told = config.model_copy(update={"teacher": TeacherConfig(path="t", context="{prompt} {hint}")})
    assert with_context_check(config, {}) == {}
    _, problems = read_splits(told.data, 0, with_context_check(told, {}))
    assert problems == [
        f"{path}:{line}: no hint, which teacher.context reads; the row has no keys (null: hint)" for line in (4, 5)
    ], "validation rows need no hint"


def test_rows_of_a_domain_that_learns_from_no_teacher_need_no_value(tokenizer: Any, write_jsonl: Any) -> None:
    rows = [{"prompt": "2+2?", "answer": "4", "tag": "math"}, {"prompt": "Hello?" * 9, "tag": "chat"}]
    data = DataConfig(train=write_jsonl("a.jsonl", *rows), domain_key="tag", shuffle=False, max_prompt_tokens=40)
    truncated = data.model_copy(update={"overlong_prompts": "truncate"})
    given = {"pipeline": "distill", "model": {"path": "m"}, "teacher": {"path": "t", "context": "{prompt} ({answer})"}}
    config = parse({**given, "loss": {"chat": {"divergence": 0, "ce": 1}}}).model_copy(update={"data": truncated})
    assert read_splits(truncated, 0, with_context_check(config, {}))[1] == []
    source = PromptSource(truncated, "train", tokenizer, 0, 2, PrivilegedContext.of(config))
    math, chat = sorted((source.next() for _ in rows), key=lambda prompt: prompt.row)
    assert tokenizer.decode(math.teacher_ids) == "<|im_start|>user\n2+2? (4)<|im_end|>\n<|im_start|>assistant\n"
    assert chat.teacher_ids == tuple(chat.token_ids) and len(chat.token_ids) == 40, "truncated alike"
    taught = parse(given).model_copy(update={"data": truncated})
    _, problems = read_splits(truncated, 0, with_context_check(taught, {}))
    assert ["a.jsonl:2: no answer, which teacher.context reads" in line for line in problems] == [True]
