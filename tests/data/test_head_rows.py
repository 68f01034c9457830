"""Rows for a value head: tokens and targets as the role reward_model and transformers read the dialogue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import TinyModel, load
from hpcrl.data import HeadRows
from hpcrl.data.dialogue_tokens import dialogue_tokens, padding_token, scored_index
from hpcrl.data.files import BadRow
from hpcrl.data.template_forms import as_taken
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.rewards.builtin.reward_model import dialogue
from hpcrl.rewards.reward import RewardItem
from hpcrl.workers.trainer import batch_of_rows
from tests.templates import TABLE, tokenizer_of
from tests.vlm import PAD, png, seeing_tokenizer

ASKED = [{"role": "system", "content": "S"}, {"role": "user", "content": "2+2 <|im_end|>?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer") / "model"
    make_tiny_model(TinyModel(hidden_size=16, num_heads=2), folder)
    return AutoTokenizer.from_pretrained(folder)


def head_rows(folder: Path, tokenizer: Any, rows: list[dict[str, Any]], *words: str) -> HeadRows:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load(["pipeline=reward_model", f"data.train={folder}/rows.jsonl", *words])
    return HeadRows(config, "train", tokenizer)


def test_a_pair_has_the_roles_tokens_and_one_more_that_is_trained(tmp_path: Path, tokenizer: Any) -> None:
    pair = {"prompt": ASKED, "chosen": "4", "rejected": "5"}
    rows = head_rows(tmp_path, tokenizer, [{**pair, "margin": 1.5}, pair])
    for place, margin in ((0, 1.5), (1, 0.0)):
        for said, sequence in zip("45", rows.sequences(place), strict=True):
            item = RewardItem(0, "x", "", said, None, {}, messages=ASKED)
            served = dialogue_tokens(tokenizer, dialogue(item))
            assert sequence.token_ids == [*served, served[-1]]
            assert sequence.loss_mask == [False] * len(served) + [True]
        assert rows.targets(place) == [[margin], [margin]]
    batch = batch_of_rows(rows, [2, 3, 0, 1])
    assert batch.chosen is not None and batch.chosen.tolist() == [True, False] * 2
    assert batch.targets is not None and batch.targets[batch.loss_mask].tolist() == [0.0, 0.0, 1.5, 1.5]
    assert batch.targets[~batch.loss_mask].tolist() == [0.0] * (batch.num_tokens - 4)
    assert batch_of_rows(rows, []).check().num_sequences == 0


@pytest.mark.parametrize("name", TABLE)
def test_dialogues_of_published_templates_are_tokenised_as_by_transformers(name: str) -> None:
    tokenizer = tokenizer_of(name)
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    given = as_taken(tokenizer, messages, None)[0]  # some templates show only lists of parts
    expected = tokenizer.apply_chat_template(given, tokenize=True, return_dict=False)
    assert dialogue_tokens(tokenizer, messages) == expected
    assert "4" in tokenizer.decode(expected[: scored_index(expected, padding_token(tokenizer)) + 1])


@pytest.mark.parametrize("kind", ["pairs", "scores"])
def test_a_dialogue_with_images_has_their_tokens_and_its_value_after_the_last_one(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.png").write_bytes(png(9, 56, 28))
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what <|image_pad|>?"}]}]
    answer = {"chosen": "4", "rejected": "5"} if kind == "pairs" else {"completion": "4", "score": 1}
    rows = head_rows(
        tmp_path, seeing_tokenizer(), [{"images": ["a.png"], "prompt": asked, **answer}], f"rm.rows={kind}"
    )
    for said, (ids, mask, media) in zip("45", rows.sequences(0), strict=False):
        text = (
            "<|im_start|>user\n<|vision_start|>{}<|vision_end|>what <|image_pad|>?<|im_end|>\n<|im_start|>assistant\n"
        )
        (image,) = media
        assert ids[image.start : image.start + image.length] == [PAD] * 2 == [token for token in ids if token == PAD]
        assert rows._tokenizer.decode(ids) == text.format("<|image_pad|>" * 2) + f"{said}<|im_end|>\n\n"
        assert mask == [False] * (len(ids) - 1) + [True]
    (tmp_path / "a.png").write_bytes(png(9)[:60])
    with pytest.raises(BadRow, match=r"rows.jsonl:1: images\[0\]: it cannot be decoded"):
        rows.encode(0)


def test_a_score_is_read_before_tokens_of_padding(tmp_path: Path, tokenizer: Any) -> None:
    """As in transformers, with a template whose end of turn is the padding token."""
    rows = head_rows(tmp_path, tokenizer, [{"prompt": "2+2?", "completion": "4", "score": 2}], "rm.rows=scores")
    ended = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"
        ids = dialogue_tokens(tokenizer, [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
        assert ids[-1] == padding_token(tokenizer)
        (sequence,) = rows.sequences(0)
        assert sequence.token_ids[:-1] == ids[:-1] and sequence.loss_mask == [False] * (len(ids) - 1) + [True]
        assert rows.targets(0) == [[2.0]]
    finally:
        tokenizer.chat_template = ended
    assert scored_index([3, 4, 0, 5, 0, 0], 0) == 3 and scored_index([0, 0], 0) == 0


@pytest.mark.parametrize("heads", ["[correctness,helpfulness]", "2"])
def test_several_scores_of_an_answer_are_targets_in_the_order_of_the_heads(
    tmp_path: Path, tokenizer: Any, heads: str
) -> None:
    """Rows of HelpSteer's form, and with a list."""
    row = {"prompt": "2+2?", "response": "4", "helpfulness": 3, "correctness": 4, "coherence": 2, "score": [4, 3]}
    other = {**row, "helpfulness": 0.5, "score": [4, 0.5]}
    rows = head_rows(tmp_path, tokenizer, [row, other], "rm.rows=scores", f"rm.heads={heads}")
    assert [rows.targets(place) for place in (0, 1)] == [[[[4.0, 3.0]]], [[[4.0, 0.5]]]]
    batch = batch_of_rows(rows, [1, 0]).check()
    assert batch.targets is not None and batch.targets[batch.loss_mask].tolist() == [[4.0, 0.5], [4.0, 3.0]]
    assert not batch.targets[~batch.loss_mask].any()
    empty = batch_of_rows(rows, []).check()
    assert empty.targets is not None and empty.targets.shape == (0, 2)
    (named,) = head_rows(tmp_path, tokenizer, [row], "rm.rows=scores", "rm.heads=[coherence]").targets(0)
    assert named == [2.0]


def test_steps_are_scored_at_their_last_tokens(tmp_path: Path, tokenizer: Any) -> None:
    """A row of TRL's form for stepwise supervision."""
    row = {"prompt": "2+2+2?", "completions": ["2+2 is 4.", "4+2 is 7."], "labels": [True, False]}
    rows = head_rows(tmp_path, tokenizer, [row], "rm.rows=steps")
    (sequence,) = rows.sequences(0)
    ends = [place for place, trained in enumerate(sequence.loss_mask) if trained]
    texts = [tokenizer.decode(sequence.token_ids[:end]) for end in ends]
    assert texts[0].endswith("assistant\n2+2 is 4.\n") and texts[1] == texts[0] + "4+2 is 7.\n"
    assert rows.targets(0) == [[1.0, 0.0]] and ends[-1] == len(sequence.token_ids) - 1


def test_long_rows_are_named(tmp_path: Path, tokenizer: Any) -> None:
    rows = head_rows(tmp_path, tokenizer, [{"prompt": "1" * 99, "chosen": "4", "rejected": "5"}], "rm.max_tokens=50")
    with pytest.raises(BadRow, match=r"rows\.jsonl:1: 1\d\d tokens are more than rm\.max_tokens=50"):
        rows.sequences(0)


@pytest.mark.parametrize(
    ("kind", "row", "error"),
    [
        ("pairs", {"chosen": "4", "rejected": " 4"}, "chosen and rejected are equal"),
        ("pairs", {"chosen": "4"}, "no rejected"),
        ("pairs", {"chosen": "4", "rejected": "5", "margin": "much"}, r"margin must be .* up to 1e\+18, got 'much'"),
        ("pairs", {"chosen": "4", "rejected": "5", "margin": True}, "margin must be a finite number .*got 'True'"),
        ("pairs", {"chosen": "4", "rejected": "5", "chat_template_kwargs": {"x": 1}}, "the row has template variables"),
        ("pairs", {"chosen": "4", "rejected": "5", "margin": 1e39}, "margin must be a finite number"),
        ("scores", {"completion": "4", "score": 10**400}, "score must be a finite number"),
        ("scores", {"completion": "4"}, "no score: the row has prompt, completion; rm.rows=pairs reads chosen"),
        ("scores", {"score": 1.0}, "no answer to learn from"),
        ("steps", {"completions": ["a", "b"], "labels": [True]}, "2 steps in completions, but 1 labels"),
        ("steps", {"completions": ["a"], "labels": ["yes"]}, r"labels must be a list of true or false, got \['yes'\]"),
        ("steps", {"completions": [], "labels": []}, "completions must be a list of texts"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, tokenizer: Any, kind: str, row: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: .*{error}"):
        head_rows(tmp_path, tokenizer, [{"prompt": "2+2?", **row}], f"rm.rows={kind}")
