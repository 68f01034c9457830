"""The rows of a supervised step, some of which only the chat template shows to be unusable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import TinyModel, load
from hpcrl.controller.supervised import AnswerRows
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.rollout.types import Sizes

pytestmark = pytest.mark.usefixtures("console")

FORGETFUL = (
    "{% for m in messages %}{{ m.role }}: "
    "{{ m.content if loop.last or m.role == 'user' else m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Leaves the thinking out of earlier turns, as the templates of thinking models do."""


class Loaded:
    """Takes the place of the trainer ranks."""

    def load_rows(self, step: int, rows: Sequence[int], sizes: Sequence[Sizes]) -> Any:
        assert len(rows) == len(sizes) > 0
        return list(rows)


def answer_rows(tmp_path: Path, thinking: set[int], num_rows: int, batch_size: int) -> AnswerRows:
    from transformers import AutoTokenizer

    make_tiny_model(TinyModel(hidden_size=16, num_heads=2), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = FORGETFUL
    lines = []
    for n in range(num_rows):
        contents = ["a", "x</think>b" if n in thinking else "b", "c", "x</think>d"]
        lines.append(
            {"messages": [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]}
        )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["+experiment=demo_sft", f"data.train={tmp_path}/rows.jsonl", f"sft.batch_size={batch_size}"]
    return AnswerRows(Loaded(), load(words), tokenizer)  # type: ignore[arg-type]


def test_rows_whose_earlier_turns_are_rewritten_are_skipped_and_counted(
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


def test_a_step_without_a_usable_row_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    rows = answer_rows(tmp_path, {0, 1}, num_rows=2, batch_size=2)
    with pytest.raises(
        ValueError, match=r"^step 1: none of its 2 rows can be learned from; .*rows.jsonl:1: the chat te"
    ):
        rows.next(1)
