"""Batches for pipelines that train on the answers in their data."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any

from hpcrl.algorithms.pairs.objective import CHOSEN_TOKENS
from hpcrl.config import Config
from hpcrl.controller.batches import BatchHandle
from hpcrl.controller.clients import Trainer
from hpcrl.data import SFTRows, epoch_order, sft_rows
from hpcrl.data.answers import TrainedSequence, with_answer_of
from hpcrl.data.files import BadRow
from hpcrl.data.tasks import Split
from hpcrl.metrics.stats import Stats, scalar
from hpcrl.rollout.types import Sizes

logger = logging.getLogger(__name__)

HELD_OUT, MIXED = -1, -2
"""Ids of batches beside the step's."""
MAX_NAMED = 10
"""Maximum number of skipped rows named in the log; further ones are only counted."""


class AnswerRows:
    """Rows of the training data, in a different order each epoch; the step determines its rows. Rows that prove
    unusable only when tokenized are skipped: their steps have fewer rows. Sequence n belongs to row n // per_row
    (hpcrl.data.answers); all sequences of a row are in one micro-batch."""

    def __init__(self, trainer: Trainer, config: Config, tokenizer: Any):
        assert config.pipeline_spec.batch_size is not None, "a pipeline without prompts has rows"
        self._trainer, self._batch_size = trainer, config.pipeline_spec.batch_size(config)
        pairs = config.pipeline_spec.pairs
        self._rows = rows = sft_rows(config.data, "train", tokenizer, config.seed, pairs)
        self._order = functools.lru_cache(2)(lambda epoch: epoch_order(config.seed, "sft", epoch, len(rows)))
        held_out = config.validates_rows
        self._held_out = sft_rows(config.data, "val", tokenizer, config.seed, pairs) if held_out else None
        self._num_held_out = config.eval.num_prompts
        self._skipped: dict[tuple[str, int], str] = {}
        self.stats: Stats = {}

    def next(self, step: int) -> BatchHandle:
        """This step's batch, on the trainer ranks. ValueError if none of its rows is usable."""
        rows = self._rows
        draws = range((step - 1) * self._batch_size, step * self._batch_size)
        drawn = sorted({int(self._order(draw // len(rows))[draw % len(rows)]) for draw in draws})
        sizes = self._sizes(rows, "train", drawn)
        if not sizes:
            why = self._skipped["train", drawn[0]]
            raise ValueError(f"step {step}: none of its {len(drawn)} rows can be learned from; {why}")
        self.stats = {
            "_tokens": scalar(sum(size.total for size in sizes.values())),
            "_samples": scalar(len(sizes)),
            "rows/skipped": scalar(len(drawn) - len(sizes) // rows.per_row),
        }
        return self._load(step, step, "train", sizes)

    def held_out(self, step: int) -> BatchHandle | None:
        """The first eval.num_prompts rows of data.val, on the trainer ranks; None if the run computes no loss on them.
        ValueError if none of them is usable."""
        rows = self._held_out
        if rows is None:
            return None
        chosen = range(min(self._num_held_out, len(rows)))
        if not (sizes := self._sizes(rows, "val", chosen)):
            raise ValueError(f"none of {len(chosen)} rows of data.val can be used; {self._skipped['val', 0]}")
        return self._load(step, HELD_OUT, "val", sizes)

    def mixed(self, batch: BatchHandle) -> BatchHandle:
        """The prompts of a batch of this object, each with the answer of the row before it, as a batch on the trainer
        ranks; the first row's prompt gets the last row's answer."""
        split: Split = "val" if batch.id == HELD_OUT else "train"
        rows = self._held_out if batch.id == HELD_OUT else self._rows
        assert rows is not None, "a batch of held-out rows has been loaded"
        given = batch.samples
        answers = dict(zip(given, given[-rows.per_row :] + given[: -rows.per_row], strict=True))
        found = {row: rows.sequences(row) for row in {sequence // rows.per_row for sequence in given}}
        most = max(size.total for size in batch.sizes.values())
        sizes = {}
        for n, other in answers.items():
            asked, answered = (found[number // rows.per_row][number % rows.per_row] for number in (n, other))
            sizes[n] = _sizes_of(with_answer_of(asked, answered, most))
        return self._load(batch.step, MIXED, split, sizes, answers)

    def _load(
        self, step: int, batch: int, split: Split, sizes: dict[int, Sizes], answers: dict[int, int] | None = None
    ) -> BatchHandle:
        per_row = self._rows.per_row
        together = {sequence: sequence // per_row for sequence in sizes} if per_row > 1 else {}
        given = (step, list(sizes), list(sizes.values()), together)
        handle = self._trainer.load_rows(*given, batch=batch, split=split, answers=answers)
        if per_row > 1:
            chosen = sum(size.model for sequence, size in sizes.items() if sequence % per_row == 0)
            handle.coefficients[CHOSEN_TOKENS] = float(chosen)
        return handle

    def _sizes(self, rows: SFTRows, split: str, chosen: Iterable[int]) -> dict[int, Sizes]:
        """The sizes of all sequences of the usable rows among these."""
        sizes: dict[int, Sizes] = {}
        for row in chosen:
            try:
                sequences = rows.sequences(row)
            except BadRow as error:
                self._skip(split, row, str(error))
            else:
                sizes |= {row * rows.per_row + n: _sizes_of(sequence) for n, sequence in enumerate(sequences)}
        return sizes

    def _skip(self, split: str, row: int, why: str) -> None:
        """Warn once about a row that is skipped."""
        if (split, row) not in self._skipped and len(self._skipped) < MAX_NAMED:
            logger.warning("%s; the row is skipped (counted in rows/skipped)", why)
        self._skipped[split, row] = why

    def state_dict(self) -> dict[str, Any]:
        return self._rows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows.load_state_dict(state)

    def held(self) -> dict[int, list[int]]:
        """Empty: no rank holds samples."""
        return {}


def _sizes_of(sequence: TrainedSequence) -> Sizes:
    return Sizes(len(sequence.token_ids), sum(sequence.loss_mask))
