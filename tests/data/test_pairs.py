"""Rows with a chosen and a rejected part: their tokens, and which are trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import DataConfig
from hpcrl.data import read_splits, sft_rows
from hpcrl.data.pairs import parse_pair
from hpcrl.data.rendering import RowCheck
from tests.vlm import PAD, png, seeing_tokenizer

END = "<|im_end|>"
SYSTEM, USER = {"role": "system", "content": "S"}, {"role": "user", "content": "2+2?"}
GOOD, BAD = {"role": "assistant", "content": "four"}, {"role": "assistant", "content": "five!"}


def pairs(path: str, tokenizer: Any, **config: Any) -> Any:
    return sft_rows(DataConfig(train=path, **config), "train", tokenizer, kind="pairs")


def problems(path: str) -> list[str]:
    return read_splits(DataConfig(train=path), 0, read_train=parse_pair)[1]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "2+2?", "chosen": "four", "rejected": "five!"}, [USER]),
        ({"question": "2+2?", "chosen": "four", "rejected": "five!", "label": 1}, [USER]),
        ({"prompt": [SYSTEM, USER], "chosen": [GOOD], "rejected": [BAD]}, [SYSTEM, USER]),
        ({"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}, [SYSTEM, USER]),
        ({"prompt": " 2+2?", "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": [USER, GOOD]}, [USER]),
        ({"prompt": "2+2?", "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])}, [USER]),
        (
            {
                "conversations": [{"from": "human", "value": "2+2?"}],
                "chosen": {"from": "gpt", "value": "four"},
                "rejected": {"from": "gpt", "value": "five!"},
            },
            [USER],
        ),
        (
            {"instruction": "2+2?", "input": "", "chosen": "four", "rejected": "five!", "system": "S"},
            [SYSTEM, USER],
        ),
    ],
)
def test_every_form_of_pair_has_the_tokens_of_the_chat_template(
    tokenizer: Any, write_jsonl: Any, row: dict[str, Any], prompt: list[dict[str, str]]
) -> None:
    found = pairs(write_jsonl("a.jsonl", row), tokenizer).sequences(0)
    begin = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    for answer, (ids, mask, _) in zip((GOOD, BAD), found, strict=True):
        whole = tokenizer.apply_chat_template([*prompt, answer], return_dict=False)
        assert ids == whole[: len(ids)] and tokenizer.decode(whole[len(ids) :]) == "\n"
        assert mask == [False] * len(begin) + [True] * (len(ids) - len(begin))
        assert tokenizer.decode(ids[len(begin) :]) == answer["content"] + END


def test_turns_of_the_prompt_are_not_trained_on_and_all_later_ones_are(tokenizer: Any, write_jsonl: Any) -> None:
    first = [USER, {"role": "assistant", "content": "", "reasoning_content": "T"}, {"role": "user", "content": "sure?"}]
    longer = [GOOD, {"role": "user", "content": "why?"}, BAD]
    path = write_jsonl("a.jsonl", {"chosen": [*first, *longer], "rejected": [*first, BAD]})
    chosen, rejected = pairs(path, tokenizer, system_prompt="S").sequences(0)
    texts = [
        tokenizer.decode([token for token, mark in zip(*part[:2], strict=True) if mark]) for part in (chosen, rejected)
    ]
    assert texts == [f"four{END}five!{END}", f"five!{END}"]
    assert tokenizer.decode(chosen[0]).startswith(f"<|im_start|>system\nS{END}")
    begin = tokenizer.apply_chat_template([SYSTEM, *first], add_generation_prompt=True, return_dict=False)
    assert chosen[0][: len(begin)] == begin == rejected[0][: len(begin)]


def test_images_have_their_tokens_in_both_parts_and_an_answer_that_writes_such_a_token_is_text(
    tmp_path: Path, write_jsonl: Any
) -> None:
    (tmp_path / "a.png").write_bytes(png(9, 56, 28))
    row = {"images": ["a.png"], "prompt": "2+2?", "chosen": "<|image_pad|>", "rejected": "<image>"}
    found = pairs(write_jsonl("a.jsonl", row), tokenizer := seeing_tokenizer()).sequences(0)
    for (ids, mask, media), answer in zip(found, (row["chosen"], row["rejected"]), strict=True):
        (image,) = media
        assert [n for n, token in enumerate(ids) if token == PAD] == [*range(image.start, image.start + image.length)]
        assert image.length == 2 and tokenizer.decode([n for n, m in zip(ids, mask, strict=True) if m]) == answer + END


def test_the_template_may_rewrite_a_prompt_but_not_a_trained_turn(tokenizer: Any, write_jsonl: Any) -> None:
    class Forgetful:
        """A template that omits the reasoning of earlier turns."""

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, *given: Any, **named: Any) -> Any:
            return tokenizer(*given, **named)

        chat_template = "own"

        def apply_chat_template(self, messages: list[dict[str, Any]], **named: Any) -> str:
            last = len(messages) - 1
            texts = (m["content"] if n == last else m["content"].split("</think>")[-1] for n, m in enumerate(messages))
            return "".join(f"{text}{END}" for text in texts) + ("A:" if named["add_generation_prompt"] else "")

    thought = {"role": "assistant", "content": "x</think>four"}
    again = {"role": "user", "content": "again"}
    in_prompt = {"chosen": [USER, thought, again, GOOD], "rejected": [USER, thought, again, BAD]}
    learned = {"chosen": [USER, thought, again, GOOD], "rejected": [USER, BAD]}
    path = write_jsonl("a.jsonl", in_prompt, learned)
    rows = pairs(path, Forgetful())
    assert tokenizer.decode(rows.sequences(0)[0][0]) == f"2+2?{END}four{END}again{END}A:four{END}"
    with pytest.raises(ValueError, match=r"a.jsonl:2: the chat template rewrites earlier turns"):
        rows.sequences(1)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (
            {"prompt": "a", "rejected": "b"},
            "no chosen: a pair has the columns chosen and rejected (data.chosen_key, data.rejected_key); the row has",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": None},
            "no rejected: a pair has the columns chosen and rejected (data.chosen_key, data.rejected_key); the row has "
            "prompt, chosen (null: rejected)",
        ),
        (
            {"chosen": "b", "rejected": "c"},
            "no prompt: chosen and rejected have only answers, and the row has none of prompt, ",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": " b\n"}, "chosen and rejected are equal"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "chosen and rejected are equal"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "rejected is empty"),
        ({"prompt": "a", "chosen": [], "rejected": "b"}, "chosen is empty"),
        (
            {"prompt": "a", "chosen": [{"role": "assistant", "content": " "}], "rejected": [BAD]},
            "chosen: the answer to learn from is empty",
        ),
        (
            {"chosen": [USER, GOOD], "rejected": [{"role": "user", "content": "3+3?"}, BAD]},
            "chosen and rejected do not answer the same prompt: they first differ in message 0",
        ),
        (
            {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, {"role": "user", "content": "b"}, BAD]},
            "chosen and rejected do not answer the same prompt: they first differ in message 2",
        ),
        ({"chosen": [USER, GOOD], "rejected": [BAD]}, "chosen and rejected do not answer the same prompt"),
        ({"prompt": "3+3?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "prompt differs from the prompt"),
        (
            {"prompt": "a", "chosen": [GOOD, USER], "rejected": "b"},
            "chosen does not end with a message of the assistant",
        ),
        ({"prompt": [USER, GOOD], "chosen": "b", "rejected": "c"}, "prompt has no user turn to answer"),
    ],
)
def test_a_bad_row_is_reported_in_one_line(tokenizer: Any, write_jsonl: Any, row: dict[str, Any], line: str) -> None:
    path = write_jsonl("a.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"}, row)
    (found,) = problems(path)
    assert found.startswith(f"{path}:2: {line}"), found
    with pytest.raises(ValueError, match=r"a.jsonl:2: "):
        pairs(path, tokenizer)


def test_generated_rows_are_refused_as_pairs(tokenizer: Any) -> None:
    check = RowCheck(tokenizer, "the model", DataConfig(), answers=True)
    (found,) = read_splits(DataConfig(train="task:add"), 0, {"train": check}, parse_pair)[1]
    assert found.startswith("task:add[0]: no chosen: ")


def test_validation_rows_are_read_as_prompts(tmp_path: Path, write_jsonl: Any) -> None:
    train = write_jsonl("a.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"})
    val = write_jsonl("b.jsonl", {"prompt": "a", "answer": "b"})
    found, wrong = read_splits(DataConfig(train=train, val=val), 0, read_train=parse_pair)
    assert not wrong and found["val"].row(0).rejected is None and found["train"].row(0).rejected is not None


def test_the_rejected_part_is_also_rendered_before_the_start(tokenizer: Any, write_jsonl: Any) -> None:
    shy = {"role": "assistant", "content": "b", "reasoning_content": "hidden"}
    path = write_jsonl("a.jsonl", {"prompt": "a", "chosen": "b", "rejected": [shy]})
    check = RowCheck(tokenizer, "the model", DataConfig(), answers=True)
    (found,) = read_splits(DataConfig(train=path), 0, {"train": check}, parse_pair)[1]
    assert found.startswith(f"{path}:1: the chat template does not show reasoning_content of the last turn")
