"""The rows of a supervised step; only the chat template reveals that some are unusable."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import TinyModel, load
from hpcrl.controller.batches import BatchHandle, assign_rows
from hpcrl.controller.supervised import AnswerRows
from hpcrl.data import sft_rows
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.rollout.types import Sizes
from hpcrl.workers.trainer import batch_of_rows

pytestmark = pytest.mark.usefixtures("console")

FORGETFUL = (
    "{% for m in messages %}{{ m.role }}: "
    "{{ m.content if loop.last or m.role == 'user' else m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Leaves the thinking out of earlier turns, as the templates of thinking models do."""


class Loaded:
    """Replaces the trainer ranks."""

    def load_rows(
        self, step: int, sequences: Sequence[int], sizes: Sequence[Sizes], keep_together: Mapping[int, int]
    ) -> Any:
        assert len(sequences) == len(sizes) > 0
        self.together, self.sizes = keep_together, dict(zip(sequences, sizes, strict=True))
        return list(sequences)


def forgetful_tokenizer(tmp_path: Path) -> Any:
    from transformers import AutoTokenizer

    make_tiny_model(TinyModel(hidden_size=16, num_heads=2), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = FORGETFUL
    return tokenizer


def answer_rows(tmp_path: Path, thinking: set[int], num_rows: int, batch_size: int) -> AnswerRows:
    tokenizer = forgetful_tokenizer(tmp_path)
    lines = []
    for n in range(num_rows):
        contents = ["a", "x</think>b" if n in thinking else "b", "c", "x</think>d"]
        lines.append(
            {"messages": [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]}
        )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["+experiment=demo_sft", f"data.train={tmp_path}/rows.jsonl", f"sft.batch_size={batch_size}"]
    return AnswerRows(Loaded(), load(words), tokenizer)  # type: ignore[arg-type]


def test_rows_whose_earlier_turns_the_template_rewrites_are_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = answer_rows(tmp_path, {1, 6}, num_rows=8, batch_size=4)
    for epoch in range(2):
        drawn, skipped = [], 0.0
        for step in (2 * epoch + 1, 2 * epoch + 2):
            batch: Any = rows.next(step)
            assert rows.stats["_samples"].total == len(batch)
            drawn += batch
            skipped += rows.stats["rows/skipped"].total
        assert (sorted(drawn), skipped) == ([0, 2, 3, 4, 5, 7], 2)
    lines = sorted(line for line in capsys.readouterr().out.splitlines() if "rows.jsonl" in line)  # others log too
    assert [line.partition("rows.jsonl:")[2][:28] for line in lines] == [
        "2: the chat template rewrite", "7: the chat template rewrite"
    ], lines  # fmt: skip
    assert all(line.endswith("; the row is skipped (counted in rows/skipped)") for line in lines)


def test_a_step_without_usable_rows_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    rows = answer_rows(tmp_path, {0, 1}, num_rows=2, batch_size=2)
    with pytest.raises(
        ValueError, match=r"^step 1: none of its 2 rows can be learned from; .*rows.jsonl:1: the chat te"
    ):
        rows.next(1)


def test_a_pair_stays_on_one_rank_and_micro_batch_or_is_dropped_whole(tmp_path: Path) -> None:
    tokenizer = forgetful_tokenizer(tmp_path)
    user, seen = {"role": "user", "content": "a"}, {"role": "assistant", "content": "x</think>b"}
    lines: list[dict[str, Any]] = [{"prompt": "a" * n, "chosen": "b" * n, "rejected": "c"} for n in range(2, 8)]
    lines[3] = {"chosen": [user, {"role": "assistant", "content": "b"}], "rejected": [user, seen, user, seen]}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [f"data.train={path}", "pipeline=tests.e2e.simpo:SPEC", "cluster.device=cpu"]
    config, trainer = load(words), Loaded()
    rows = AnswerRows(trainer, config, tokenizer)  # type: ignore[arg-type]
    drawn: list[int] = []
    for step in (1, 2, 3):  # 8 rows a step of 6 rows: each step draws all of them, the last a second time in part
        sequences: Any = rows.next(step)
        assert 6 not in sequences and 7 not in sequences, "the template rewrites a turn of the rejected part"
        assert [n ^ 1 for n in sequences[::2]] == sequences[1::2] and all(n % 2 == 0 for n in sequences[::2])
        assert rows.stats["rows/skipped"].total == 1 and rows.stats["_samples"].total == len(sequences) == 10
        assert trainer.together == {n: n // 2 for n in sequences}
        drawn += sequences
    sizes = trainer.sizes
    assert sizes[2].model == 3 + 1 and sizes[3].model == 1 + 1, "text and end token"
    assigned = assign_rows(sizes, [sorted(sizes)], [1, 2], keep_together=trainer.together)
    handle = BatchHandle(1, 1, sizes, [sorted(sizes)], assigned, keep_together=trainer.together)
    for rank, micro_batches in handle.plan(assigned, handle.samples, 30).items():
        assert len(micro_batches) > 1
        for micro_batch in micro_batches:
            held = [assigned[rank][place] for place in micro_batch]
            assert held[1::2] == [n + 1 for n in held[::2]], "whole pairs, chosen first"
    batch = batch_of_rows(sft_rows(config.data, "train", tokenizer, kind="pairs"), assigned[1]).check()
    assert batch.chosen is not None and batch.chosen.tolist() == [True, False] * (len(assigned[1]) // 2)
    assert batch.group_ids.tolist() == [n // 2 for n in assigned[1]] and batch.sample_ids.tolist() == assigned[1]
    assert batch.lengths.tolist() == [sizes[n].total for n in assigned[1]]
    empty = batch_of_rows(sft_rows(config.data, "train", tokenizer, kind="pairs"), [])
    assert empty.chosen is not None and empty.chosen.tolist() == [] and empty.num_sequences == 0


def labelled_rows(tmp_path: Path, lines: Sequence[Mapping[str, Any]], *words: str) -> tuple[AnswerRows, Any, Loaded]:
    tokenizer = forgetful_tokenizer(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = [f"data.train={path}", "pipeline=tests.e2e.labelled:SPEC", "cluster.device=cpu", *words]
    config, trainer = load(given), Loaded()
    rows = AnswerRows(trainer, config, tokenizer, tmp_path / "model")  # type: ignore[arg-type]
    return rows, sft_rows(config.data, "train", tokenizer, kind=config.row_kind, model=tmp_path / "model"), trainer


def test_labelled_answers_and_pairs_become_marked_sequences(tmp_path: Path) -> None:
    rows, same, trainer = labelled_rows(
        tmp_path,
        [
            {"prompt": "a", "completion": "b", "label": False},
            {"prompt": "a", "chosen": "c", "rejected": "d"},
            {"prompt": "a", "completion": "e", "label": True},
        ],
        "own.kind=labelled",
    )
    sequences: Any = rows.next(1)
    assert sequences == [0, 2, 3, 4] and trainer.together == {}
    assert rows.stats["rows/skipped"].total == 0 and rows.stats["_samples"].total == 4
    batch = batch_of_rows(same, [4, 0, 3, 2]).check()
    assert batch.chosen is not None and batch.chosen.tolist() == [True, False, False, True]
    assert batch.group_ids.tolist() == [2, 0, 1, 1]


def test_rows_over_the_limit_are_dropped_or_cut_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"prompt": "a" * n, "chosen": "b" * n, "rejected": "c"} for n in (1, 2, 30)]
    words = ["own.kind=pairs", "data.max_sequence_tokens=50"]
    rows, _, _ = labelled_rows(tmp_path, lines, *words)
    sequences: Any = rows.next(1)
    counts = {name: rows.stats[f"rows/{name}"].total for name in ("skipped", "too_long", "cut")}
    assert len(sequences) == 4 and counts == {"skipped": 1, "too_long": 1, "cut": 0}
    assert (
        "rows.jsonl:3: the row has 67 tokens with its answer, more than data.max_sequence_tokens=50; the row is sk"
        in (told := capsys.readouterr().out)
    ), told
    rows, same, trainer = labelled_rows(tmp_path, lines, *words, "data.overlong_sequences=keep_start")
    rows.next(1)
    rows.next(2)
    counts = {name: rows.stats[f"rows/{name}"].total for name in ("skipped", "too_long", "cut")}
    assert counts == {"skipped": 0, "too_long": 0, "cut": 1} and max(s.total for s in trainer.sizes.values()) == 50
    assert batch_of_rows(same, [4, 5]).lengths.max() == 50, "ranks cut like the controller"
    told = capsys.readouterr().out
    assert told.count("rows.jsonl:3: 17 tokens over data.max_sequence_tokens=50 are cut") == 1, told


def test_rows_left_out_are_told_at_the_start_and_steps_stay_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"prompt": "a", "chosen": "b", "rejected": "b" if n % 2 else "c"} for n in range(8)]
    rows, _, _ = labelled_rows(tmp_path, lines, "own.kind=pairs", "data.unusable_rows=drop")
    for step in (1, 2):
        sequences: Any = rows.next(step)
        assert len(sequences) == 8 and rows.stats["rows/skipped"].total == 0
    told = capsys.readouterr().out
    assert "4 rows of data.train are left out (data.unusable_rows=drop)" in told
    assert "left out: " in told and "rows.jsonl:2: chosen and rejected are equal" in told
