"""Prompts with the answers of other rows, from which KTO estimates its KL term."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hpcrl.config import TinyModel, load
from hpcrl.controller.batches import BatchHandle
from hpcrl.controller.supervised import MIXED, AnswerRows
from hpcrl.data import sft_rows
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.workers.trainer import batch_of_rows

ROWS: list[dict[str, Any]] = [
    {"prompt": "one?", "completion": "1", "label": True},
    {"prompt": "three hundred?", "completion": "300", "label": False},
    {"prompt": "two?", "chosen": "2", "rejected": "zwei"},
    {"prompt": "four?", "completion": "4", "label": True},
]


class Loaded:
    """Replaces the trainer ranks."""

    def load_rows(self, step: int, sequences: Any, sizes: Any, together: Any, **more: Any) -> BatchHandle:
        self.given, self.together, self.sizes = more, together, dict(zip(sequences, sizes, strict=True))
        return BatchHandle(more.get("batch", step), step, self.sizes, [sorted(sequences)], {0: list(sequences)})


def test_each_prompt_gets_the_answer_of_the_row_before_it(tmp_path: Path) -> None:
    make_tiny_model(TinyModel(hidden_size=16, num_heads=2), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = ["pipeline=dpo", "dpo.loss=kto", "dpo.batch_size=4", f"data.train={tmp_path}/rows.jsonl"]
    config, trainer = load(words), Loaded()
    rows = AnswerRows(trainer, config, tokenizer)  # type: ignore[arg-type]
    batch = rows.next(1)
    assert batch.samples == [0, 2, 4, 5, 6] and not trainer.together and not trainer.given
    mixed = rows.mixed(batch)
    answers = trainer.given["answers"]
    assert mixed.id == MIXED and answers == {0: 6, 2: 0, 4: 2, 5: 2, 6: 4} and trainer.given["split"] == "train"
    most = max(size.total for size in batch.sizes.values())
    read = sft_rows(config.data, "train", tokenizer, kind=config.row_kind)
    made = batch_of_rows(read, batch.samples, [answers[n] for n in batch.samples], most).check()
    assert made.lengths.tolist() == [trainer.sizes[n].total for n in batch.samples]
    trained = [int(part.sum()) for part in made.loss_mask.split(made.lengths.tolist())]
    assert trained == [trainer.sizes[n].model for n in batch.samples]
    texts = [tokenizer.decode(row) for row in made.token_ids.split(made.lengths.tolist())]
    assert ["one?" in texts[0], "4<|im_end|>" in texts[0], "two?" in texts[3], "300" in texts[3]] == [True] * 4
