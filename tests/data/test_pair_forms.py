"""Pairs and labelled answers in the forms in which others publish them. The texts are made up, the columns and their
types are those of the data sets' pages."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from hpcrl.config import DataConfig
from hpcrl.data import READERS, read_splits, sft_rows
from hpcrl.data.pair_forms import common_beginning, spoken_dialogue
from hpcrl.data.rows import Row, RowSet
from hpcrl.spec.media import IMAGE_MARK

USER, GOOD, BAD = (
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "four"},
    {"role": "assistant", "content": "five!"},
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)

FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # huggingface.co/docs/trl/dataset_formats
    "TRL explicit prompt": ({"prompt": "2+2?", "chosen": "four", "rejected": "five!"}, {}),
    "TRL conversational": ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {}),
    "TRL conversational, implicit prompt": ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
    # huggingface.co/datasets/OpenRLHF/preference_dataset_mixture2_and_safe_pku
    "OpenRLHF": (
        {"rejected": [USER, BAD], "rejected_score": 1.0, "chosen_score": 2.5, "chosen": [USER, GOOD]},
        {},
    ),
    # github.com/OpenRLHF/OpenRLHF, README: --input_key, --chosen_key, --rejected_key
    "OpenRLHF with names of columns": (
        {"question": "2+2?", "response_j": "four", "response_k": "five!", "input": "2+2?"},
        {"prompt_key": "input", "chosen_key": "response_j", "rejected_key": "response_k"},
    ),
    # huggingface.co/datasets/HuggingFaceH4/ultrafeedback_binarized
    "UltraFeedback binarized": (
        {
            "prompt": "2+2?",
            "prompt_id": "af26f2b0",
            "chosen": [USER, GOOD],
            "rejected": [USER, BAD],
            "messages": [USER, GOOD],
            "score_chosen": 8.5,
            "score_rejected": 4.0,
        },
        {},
    ),
    # huggingface.co/datasets/Anthropic/hh-rlhf
    "hh-rlhf": (
        {"chosen": "\n\nHuman: 2+2?\n\nAssistant: four", "rejected": "\n\nHuman: 2+2?\n\nAssistant: five!"},
        {},
    ),
    # huggingface.co/datasets/Dahoas/rm-static
    "hh-rlhf with a prompt": (
        {
            "prompt": "\n\nHuman: 2+2?\n\nAssistant:",
            "response": "four",
            "chosen": "four",
            "rejected": "five!",
        },
        {},
    ),
    # huggingface.co/datasets/allenai/llama-3.1-tulu-3-8b-preference-mixture
    "Tulu 3": (
        {
            "id": "x_1",
            "source": "ultrafeedback",
            "prompt": "2+2?",
            "chosen": [USER, GOOD],
            "rejected": [USER, BAD],
            "chosen_rating": 5.0,
            "rejected_rating": 3.25,
            "chosen_model": "a",
            "rejected_model": "b",
        },
        {"domain_key": "source"},
    ),
    # huggingface.co/datasets/nvidia/HelpSteer3
    "HelpSteer3": (
        {
            "domain": "general",
            "language": "english",
            "context": [USER],
            "response1": "five!",
            "response2": "four",
            "overall_preference": 2,
            "individual_preference": [{"score": 2, "reasoning": "", "feedback1": "", "feedback2": ""}],
        },
        {"domain_key": "domain"},
    ),
    # huggingface.co/datasets/nvidia/HelpSteer2, preference
    "HelpSteer2": (
        {
            "split": "train",
            "prompt": "2+2?",
            "response_1": "four",
            "response_2": "five!",
            "preference_strength": -1,
            "preference_statement": "",
        },
        {},
    ),
}

TWO = json.dumps({"question": "2+2?", "chosen": "four", "rejected": "five!"})
ASKED = [{"text": None, "type": "image"}, {"text": "2+2?", "type": "text"}]
SHOWN: dict[str, dict[str, Any]] = {
    # huggingface.co/datasets/HuggingFaceH4/rlaif-v_formatted, for TRL's dpo_vlm.py
    "TRL": {
        "images": [{"bytes": PIXEL, "path": None}],
        "prompt": [{"role": "user", "content": ASKED}],
        "chosen": [{"role": "assistant", "content": [{"text": "four", "type": "text"}]}],
        "rejected": [{"role": "assistant", "content": [{"text": "five!", "type": "text"}]}],
    },
    # huggingface.co/docs/trl/dataset_formats: images in a column, texts without their places
    "TRL, texts": {"images": ["a.png"], "prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    # huggingface.co/datasets/openbmb/RLAIF-V-Dataset
    "RLAIF-V": {
        "ds_name": "RLAIF-V",
        "image": {"bytes": PIXEL, "path": "1.jpg"},
        "question": "2+2?",
        "chosen": "four",
        "rejected": "five!",
        "origin_dataset": "coco",
        "origin_split": "{}",
        "idx": "1",
        "image_path": "1.jpg",
    },
    # huggingface.co/datasets/openbmb/RLHF-V-Dataset
    "RLHF-V": {"ds_name": "RLHF-V", "image": {"bytes": PIXEL, "path": "1.jpg"}, "text": TWO, "idx": 1},
    # huggingface.co/datasets/OpenGVLab/MMPR
    "MMPR": {"image": "a.png", "question": "<image>2+2?", "chosen": "four", "rejected": "five!"},
    # huggingface.co/datasets/llamafactory/RLHF-V
    "LLaMA-Factory": {
        "conversations": [{"from": "human", "value": "<image>2+2?"}],
        "chosen": {"from": "gpt", "value": "four"},
        "rejected": {"from": "gpt", "value": "five!"},
        "images": ["a.png"],
    },
}


def only_row(path: str, kind: str = "pairs", **config: Any) -> Row:
    (rows, wrong) = read_splits(DataConfig(train=path, **config), 0, read_train=READERS[kind])  # type: ignore[index]
    assert not wrong, wrong
    return rows["train"].row(0)


def problem_of(path: str, kind: str = "pairs", **config: Any) -> str:
    (_, wrong) = read_splits(DataConfig(train=path, **config), 0, read_train=READERS[kind])  # type: ignore[index]
    (line,) = wrong
    return line


@pytest.mark.parametrize("name", FORMS)
def test_a_published_form_is_read_as_prompt_chosen_and_rejected(write_jsonl: Any, name: str) -> None:
    raw, config = FORMS[name]
    row = only_row(write_jsonl("a.jsonl", raw), **config)
    assert row.rejected is not None
    assert row.messages == row.rejected.messages == [USER]
    assert (row.turn, row.rejected.turn) == (GOOD, BAD)
    both = only_row(write_jsonl("a.jsonl", raw), "labelled", **config)
    assert (both.turn, both.rejected and both.rejected.turn, both.label) == (GOOD, BAD, None)


def test_texts_with_a_common_beginning_are_cut_before_the_word_that_differs(write_jsonl: Any) -> None:
    """TRL's implicit prompt; TRL 1.16's extract_prompt cuts at the same place if words differ in their first letter."""
    row = only_row(
        write_jsonl("a.jsonl", {"chosen": "The sky is blue.", "rejected": "The sky is green."}),
    )
    assert row.messages == [{"role": "user", "content": "The sky is"}] and row.rejected is not None
    assert (row.turn, row.rejected.turn) == (GOOD | {"content": " blue."}, BAD | {"content": " green."})
    assert common_beginning("is blue", "is black") == "is", "TRL cuts words: 'is bl'"
    assert common_beginning("blue", "black") == ""
    assert common_beginning("a b c", "a b") == "a", "no part becomes empty"


def test_dialogues_in_one_text_have_several_turns_and_may_differ_in_length(write_jsonl: Any) -> None:
    begin = "\n\nHuman: Hi\n\nAssistant: Hello. \n\nHuman: In the text:\nHuman: no turn.\n\nAssistant:"
    row = only_row(
        write_jsonl("a.jsonl", {"chosen": f"{begin} yes", "rejected": f"{begin} no\n\nHuman: ok\n\nAssistant: bye"})
    )
    contents = [message["content"] for message in row.messages]
    assert contents == ["Hi", "Hello.", "In the text:\nHuman: no turn."] and row.rejected is not None
    assert [message["content"] for message in row.rejected.messages[3:]] == ["no", "ok"]
    assert (row.prompt_messages, row.rejected.prompt_messages) == (3, 3)
    assert spoken_dialogue("Human: alone") is None and spoken_dialogue(["a"]) is None


def test_tools_calls_and_images_of_the_prompt_stay_with_both_parts(tmp_path: Path, write_jsonl: Any) -> None:
    (tmp_path / "a.png").write_bytes(PIXEL)
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]}
    shown = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "2+2?"}]}
    row = only_row(write_jsonl("a.jsonl", {"chosen": [shown, call], "rejected": [shown, BAD], "tools": [TOOL]}))
    assert row.rejected is not None and row.tools == row.rejected.tools == [TOOL]
    assert len(row.images) == len(row.rejected.images) == 1 and row.images[0].path.name == "a.png"
    assert row.turn is not None and row.turn["tool_calls"][0]["function"]["arguments"] == {}
    # TRL's vision data sets: a column of images, and parts without one
    marked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "2+2?"}]}]
    column = {"images": ["a.png"], "prompt": marked, "chosen": [GOOD], "rejected": [BAD]}
    row = only_row(write_jsonl("b.jsonl", column))
    assert row.rejected is not None and len(row.images) == len(row.rejected.images) == 1
    other = {"role": "user", "content": [{"type": "image", "image": "b.png"}, {"type": "text", "text": "2+2?"}]}
    assert "chosen and rejected have different images" in problem_of(
        write_jsonl("c.jsonl", {"chosen": [shown, GOOD], "rejected": [other, BAD]})
    )
    answered = {"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}
    assert "only a prompt may have images" in problem_of(
        write_jsonl("d.jsonl", {"prompt": "a", "chosen": [answered], "rejected": [BAD]})
    )


@pytest.mark.parametrize("kind", ["pairs", "labelled"])
@pytest.mark.parametrize("name", SHOWN)
def test_a_published_form_with_an_image_is_read(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "a.png").write_bytes(PIXEL)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([SHOWN[name]]), tmp_path / "a.parquet")
    row = only_row(str(tmp_path / "a.parquet"), kind)
    assert row.rejected is not None
    assert row.messages == row.rejected.messages == [{"role": "user", "content": f"{IMAGE_MARK}2+2?"}]
    assert (row.turn, row.rejected.turn) == (GOOD, BAD)
    assert [image.read() for image in row.images] == [image.read() for image in row.rejected.images] == [PIXEL]


@pytest.mark.parametrize("column", ["prompt", "messages", "instruction", "own"])
def test_a_pair_within_a_text_answers_the_question_beside_it(write_jsonl: Any, column: str) -> None:
    """Not that of another column, which the answers do not belong to."""
    own = {"prompt_key": "own"} if column == "own" else {}
    row = only_row(write_jsonl("a.jsonl", {column: "3+3?", "input": "Be short.", "text": TWO}), **own)
    assert row.rejected is not None
    assert row.messages == row.rejected.messages == [USER]
    assert (row.turn, row.rejected.turn) == (GOOD, BAD)


@pytest.mark.parametrize("prompt", [[{"role": "user", "content": ASKED}], "<image>2+2?", "2+2?"])
def test_a_labelled_answer_may_have_an_image(tmp_path: Path, write_jsonl: Any, prompt: Any) -> None:
    (tmp_path / "a.png").write_bytes(PIXEL)
    raw = {"images": ["a.png"], "prompt": prompt, "completion": "four", "label": False}
    row = only_row(write_jsonl("a.jsonl", raw), "labelled")
    assert row.messages == [{"role": "user", "content": f"{IMAGE_MARK}2+2?"}] and len(row.images) == 1
    assert (row.turn, row.label, row.prompt_messages) == (GOOD, False, 1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"images": ["a.png", "a.png"]}, "2 images for 1 image parts without content"),
        ({"images": []}, "0 images for 1 image parts without content"),
        ({"images": ["b.png"]}, "images[0]: {}/b.png cannot be read: No such file or directory"),
        ({"images": ["pairs.jsonl"]}, "images[0]: the content begins like none of png, jpg, jpeg, webp, gif, bmp"),
        ({"prompt": "<image>2+2?<image>"}, "1 images for 2 <image> in the messages"),
        (
            {"chosen": [{"role": "assistant", "content": [{"type": "image"}, {"type": "text", "text": "four"}]}]},
            "chosen: only a prompt may have images",
        ),
        (
            {"rejected": [{"role": "assistant", "content": "five!", "images": ["a.png"]}]},
            "rejected: only a prompt may have images",
        ),
        ({"chosen": [{"role": "assistant", "content": "five!"}]}, "chosen and rejected are equal"),
    ],
)
def test_a_pair_whose_images_do_not_fit_is_refused_with_its_line(
    tmp_path: Path, write_jsonl: Any, changes: dict[str, Any], text: str
) -> None:
    (tmp_path / "a.png").write_bytes(PIXEL)
    raw = SHOWN["TRL"] | {"images": ["a.png"]}
    path = write_jsonl("pairs.jsonl", raw, raw | changes)
    assert problem_of(path).startswith(f"{path}:2: {text.format(tmp_path)}")
    assert problem_of(path, "labelled") == problem_of(path)


@pytest.mark.parametrize("text", ["a text", "{", '{"question": "a", "chosen": "b"}', "[1]", "{" * 100_000])
def test_a_column_text_without_a_pair_is_an_ordinary_column(write_jsonl: Any, text: str) -> None:
    assert only_row(write_jsonl("a.jsonl", {**FORMS["TRL explicit prompt"][0], "text": text})).rejected is not None
    assert "no chosen" in problem_of(write_jsonl("b.jsonl", {"prompt": "2+2?", "text": text}))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"score_chosen": 4.0}, "chosen and rejected are tied (score_chosen and score_rejected are 4)"),
        ({"score_chosen": 3}, "score_chosen is 3, below score_rejected, which is 4"),
        ({"chosen": [USER, BAD]}, "chosen and rejected are equal"),
        ({"rejected": [USER, BAD | {"content": " "}]}, "rejected: the answer to learn from is empty"),
    ],
)
def test_a_pair_that_teaches_nothing_is_refused_with_its_line(
    write_jsonl: Any, changes: dict[str, Any], text: str
) -> None:
    raw = FORMS["UltraFeedback binarized"][0]
    path = write_jsonl("a.jsonl", raw, raw | changes)
    assert problem_of(path) == f"{path}:2: {text}"


def test_other_ties_and_scores_that_are_no_numbers(write_jsonl: Any) -> None:
    tie = FORMS["HelpSteer3"][0] | {"overall_preference": 0}
    assert problem_of(write_jsonl("a.jsonl", tie)).endswith("the responses are tied (overall_preference is 0)")
    unknown = FORMS["HelpSteer3"][0] | {"overall_preference": None}
    assert problem_of(write_jsonl("a.jsonl", unknown)).endswith("overall_preference must be a number, not 'None'")
    raw = FORMS["OpenRLHF"][0]
    for scores in ({"chosen_score": None}, {"chosen_score": "1", "rejected_score": "1"}, {"chosen_score": True}):
        assert only_row(write_jsonl("a.jsonl", raw | scores)).rejected is not None
    for size in (1e30, 10**400):
        large = FORMS["HelpSteer3"][0] | {"overall_preference": size}
        assert "overall_preference must be a number" in problem_of(write_jsonl("a.jsonl", large))


@pytest.mark.parametrize("answer", ["[sighs] four", "[", "[1, 2]", '["role"]', "[" * 100_000])
def test_an_answer_that_begins_with_a_bracket_is_text(write_jsonl: Any, answer: str) -> None:
    row = only_row(write_jsonl("a.jsonl", {"prompt": "2+2?", "chosen": answer, "rejected": "[five]"}))
    assert row.turn == {"role": "assistant", "content": answer}
    assert row.rejected is not None and row.rejected.turn == {"role": "assistant", "content": "[five]"}


@pytest.mark.parametrize(
    ("raw", "config"),
    [
        # huggingface.co/docs/trl/dataset_formats: unpaired preference
        ({"prompt": "2+2?", "completion": "four", "label": True}, {}),
        ({"prompt": [USER], "completion": [GOOD], "label": True}, {}),
        # github.com/OpenRLHF/OpenRLHF, train_kto: --input_key, --output_key, --label_key
        ({"instruction": "2+2?", "response": "four", "score": 1}, {"label_key": "score"}),
        # github.com/hiyouga/LLaMA-Factory, data/kto_en_demo.json
        ({"messages": [USER, GOOD], "label": True}, {}),
        ({"prompt": "\n\nHuman: 2+2?\n\nAssistant:", "completion": "four", "label": True}, {}),
    ],
)
def test_a_labelled_answer_is_read(write_jsonl: Any, raw: dict[str, Any], config: dict[str, Any]) -> None:
    row = only_row(write_jsonl("a.jsonl", raw), "labelled", **config)
    assert (row.messages, row.turn, row.label, row.rejected) == ([USER], GOOD, True, None)
    key = config.get("label_key", "label")
    for bad in (False, 0):
        assert only_row(write_jsonl("a.jsonl", raw | {key: bad}), "labelled", **config).label is False


@pytest.mark.parametrize(
    ("label", "shown"),
    [("True", "'True' of type str"), ("1", "'1' of type str"), (2, "'2'"), (0.5, "'0.5'"), ([1], "'[1]' of type list")],
)
def test_a_label_that_is_not_boolean_is_refused(write_jsonl: Any, label: Any, shown: str) -> None:
    good = {"prompt": "a", "completion": "b", "label": True}
    path = write_jsonl("a.jsonl", good, good | {"label": label})
    wanted = "label must be true or false, or the integers 1 or 0, not"
    assert problem_of(path, "labelled") == f"{path}:2: {wanted} {shown}"


def test_a_row_without_label_or_answer_is_refused(tokenizer: Any, write_jsonl: Any) -> None:
    path = write_jsonl("a.jsonl", {"prompt": "a", "completion": "b"})
    assert problem_of(path, "labelled").startswith(f"{path}:1: no label: a labelled row says whether")
    path = write_jsonl("b.jsonl", {"prompt": "a", "completion": " ", "label": False})
    with pytest.raises(ValueError, match=r"b.jsonl:1: the answer to learn from is empty"):
        sft_rows(DataConfig(train=path), "train", tokenizer, kind="labelled")


def test_only_the_labelled_answer_is_trained_on(tokenizer: Any, write_jsonl: Any) -> None:
    again = {"role": "user", "content": "sure?"}
    path = write_jsonl(
        "a.jsonl",
        {"messages": [USER, BAD, again, GOOD], "label": False},
        {"prompt": [USER, BAD, again], "completion": [GOOD, again, BAD], "label": True},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    )
    rows = sft_rows(DataConfig(train=path), "train", tokenizer, kind="labelled")
    found = []
    for index in range(3):
        row = rows.encode(index)
        for (ids, mask, _), chosen in zip(row.sequences, row.chosen, strict=True):
            found.append((tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m]), chosen))
    end = "<|im_end|>"
    assert found == [
        (f"four{end}", False), (f"four{end}five!{end}", True), (f"four{end}", True), (f"five!{end}", False)
    ]  # fmt: skip


def test_unusable_rows_are_left_out_counted_and_named(tokenizer: Any, write_jsonl: Any) -> None:
    raw = FORMS["UltraFeedback binarized"][0]
    tied = raw | {"score_chosen": 4}
    path = write_jsonl("a.jsonl", *[tied] * 12, raw, raw | {"chosen": None}, raw | {"prompt_id": "second"})
    rows = RowSet(DataConfig(train=path), "train", 0, read=READERS["pairs"], drop=True)
    assert (rows.unusable, rows.first_usable, rows.num_left_out) == ([*range(12), 13], 12, 13)
    assert len(rows.left_out) == 10 and rows.left_out[0].startswith(f"{path}:1: chosen and rejected are tied")
    config = DataConfig(train=path, unusable_rows="drop")
    usable = sft_rows(config, "train", tokenizer, kind="pairs")
    assert len(usable) == 2 and [usable.where(n) for n in range(2)] == [f"{path}:13", f"{path}:15"]
    assert usable.sequences(1) == usable.sequences(0)
    nothing = write_jsonl("b.jsonl", tied, tied)
    with pytest.raises(ValueError, match=r"data.train: none of the 2 rows can be used; .*b.jsonl:1: chosen and"):
        sft_rows(DataConfig(train=nothing, unusable_rows="drop"), "train", tokenizer, kind="pairs")
    empty = write_jsonl("c.jsonl", {"prompt": "a", "completion": ""}, {"prompt": "a", "completion": "b"})
    config = DataConfig(train=empty, unusable_rows="drop")
    assert len(sft_rows(config, "train", tokenizer)) == 1, "answers, too"


def test_forms_survive_arrow_which_writes_nulls_for_absent_keys(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    raws = [FORMS[name][0] for name in ("UltraFeedback binarized", "Tulu 3")]
    parquet.write_table(arrow.Table.from_pylist([raws[0]]), tmp_path / "a.parquet")
    parquet.write_table(arrow.Table.from_pylist([raws[1]]), tmp_path / "b.parquet")
    for name in ("a", "b"):
        row = only_row(str(tmp_path / f"{name}.parquet"))
        assert (row.messages, row.turn) == ([USER], GOOD)


def test_a_json_text_of_messages_is_a_dialogue(write_jsonl: Any) -> None:
    row = only_row(write_jsonl("a.jsonl", {"chosen": json.dumps([USER, GOOD]), "rejected": json.dumps([USER, BAD])}))
    assert (row.messages, row.turn) == ([USER], GOOD)
