"""Rows longer than the context: which side is cut, or that they are dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import DataConfig
from hpcrl.data import sft_rows
from hpcrl.data.row_lengths import LengthLimit, TooLong, context_of
from hpcrl.spec.media import Medium

N, Y = False, True
SHORT, LONG = ([1, 2, 3, 4], [N, N, Y, Y], ()), ([1, 2, 5, 6, 7, 8], [N, N, Y, Y, Y, Y], ())


def cut(limit: int, mode: str, *sequences: Any) -> Any:
    return LengthLimit(limit, "the limit").fit(sequences, mode, "a.jsonl:1")


def test_the_end_of_the_answer_is_cut_as_in_trl() -> None:
    """TRL 1.16, DataCollatorForPreference with truncation_mode=keep_start: ids[:max_length], of each part."""
    assert cut(5, "keep_start", SHORT, LONG) == ([SHORT, ([1, 2, 5, 6, 7], [N, N, Y, Y, Y], ())], 1)
    assert cut(3, "keep_start", SHORT, LONG)[0] == [([1, 2, 3], [N, N, Y], ()), ([1, 2, 5], [N, N, Y], ())]
    with pytest.raises(TooLong, match=r"^a.jsonl:1: the row has 6 tokens .* more than the limit, and nothing of its"):
        cut(2, "keep_start", SHORT, LONG)  # TRL drops pairs whose prompt alone fills max_length


def test_the_beginning_of_the_prompt_is_cut_equally_in_both_parts() -> None:
    assert cut(5, "keep_end", SHORT, LONG) == ([([2, 3, 4], [N, Y, Y], ()), ([2, 5, 6, 7, 8], [N, Y, Y, Y, Y], ())], 2)
    with pytest.raises(TooLong, match="its answer is too long without the prompt"):
        cut(4, "keep_end", SHORT, LONG)


def test_rows_that_fit_are_not_changed_and_others_are_dropped_or_refused() -> None:
    for mode in ("drop", "keep_start", "keep_end", "error"):
        assert cut(6, mode, SHORT, LONG) == ([SHORT, LONG], 0)
        assert LengthLimit(None, "").fit([LONG], mode, "") == ([LONG], 0)
    with pytest.raises(TooLong, match=r"^a.jsonl:1: the row has 6 tokens with its answer, more than the limit$"):
        cut(5, "drop", SHORT, LONG)
    with pytest.raises(ValueError, match=r"data\.overlong_sequences=drop, keep_start or keep_end") as error:
        cut(5, "error", SHORT, LONG)
    assert not isinstance(error.value, TooLong), "ends the run"


def test_images_are_neither_cut_in_two_nor_moved() -> None:
    image = Medium("image", b"", start=3, length=4)
    ids, mask = list(range(9)), [N, Y, Y, N, N, N, N, Y, Y]
    assert cut(5, "keep_start", (ids, mask, (image,))) == ([([0, 1, 2], mask[:3], ())], 6)
    assert cut(7, "keep_start", (ids, mask, (image,))) == ([(ids[:7], mask[:7], (image,))], 2)
    with pytest.raises(TooLong, match="a prompt with images is not cut"):
        cut(8, "keep_end", (ids, mask, (image,)))


def test_the_limit_is_the_models_context_if_no_key_sets_another(
    tmp_path: Path, tokenizer: Any, write_jsonl: Any
) -> None:
    path = write_jsonl("a.jsonl", {"prompt": "a" * 30, "chosen": "b" * 30, "rejected": "c"})
    whole = sft_rows(DataConfig(train=path), "train", tokenizer, kind="pairs").sequences(0)
    longest = max(len(sequence.token_ids) for sequence in whole)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": longest - 1}}))
    limited = sft_rows(DataConfig(train=path), "train", tokenizer, kind="pairs", model=tmp_path)
    with pytest.raises(TooLong, match=f"more than the model's context of {longest - 1}$"):
        limited.encode(0)
    config = DataConfig(train=path, max_sequence_tokens=longest)
    assert sft_rows(config, "train", tokenizer, kind="pairs", model=tmp_path).encode(0).num_cut == 0
    config = DataConfig(train=path, max_sequence_tokens=longest - 3, overlong_sequences="keep_start")
    row = sft_rows(config, "train", tokenizer, kind="pairs", model=tmp_path).encode(0)
    assert row.num_cut == 3 and row.sequences[1] == whole[1] and row.chosen == [True, False]
    assert row.sequences[0].token_ids == whole[0].token_ids[:-3]
    for wrong in ("{}", "[", '{"max_position_embeddings": -1}'):
        (tmp_path / "config.json").write_text(wrong)
        assert context_of(tmp_path) is None
