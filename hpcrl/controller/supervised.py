"""Batches for pipelines that train on the answers in their data."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.controller.batches import BatchHandle
from hpcrl.controller.clients import Trainer
from hpcrl.data import HeadRows, SFTRows, epoch_order, sft_rows
from hpcrl.data.answers import TrainedSequence, with_answer_of
from hpcrl.data.files import BadRow
from hpcrl.data.row_lengths import TooLong
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
    unusable or too long only when tokenized are skipped: their steps have fewer rows. Sequence n belongs to row
    n // per_row (hpcrl.data.answers); both sequences of a pair are in one micro-batch.

    Args:
        model: The model's folder, whose context limits the rows.
        source: The key of the rows, for messages.
        metrics: The first part of the names of `stats`.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: Config,
        tokenizer: Any,
        model: Path | None = None,
        source: str = "data.train",
        metrics: str = "rows",
    ):
        assert config.pipeline_spec.batch_size is not None, "a pipeline without prompts has rows"
        self._trainer, self._batch_size = trainer, config.pipeline_spec.batch_size(config)
        self._metrics = metrics
        self._rows = rows = _rows_of(config, "train", tokenizer, model)
        self._order = functools.lru_cache(2)(lambda epoch: epoch_order(config.seed, "sft", epoch, len(rows)))
        self._held_out = _rows_of(config, "val", tokenizer, model) if config.validates_rows else None
        self._num_held_out = config.eval.num_prompts
        self._skipped: dict[tuple[str, int], str] = {}
        self._cut: set[tuple[str, int]] = set()
        self.stats: Stats = {}
        if rows.num_left_out:
            logger.warning("%d rows of %s are left out (data.unusable_rows=drop)", rows.num_left_out, source)
        for problem in rows.left_out:
            logger.warning("left out: %s", problem)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that draw every row."""
        return -(-len(self._rows) // self._batch_size)

    @property
    def max_tokens(self) -> int | None:
        """Maximum tokens of a sequence."""
        return self._rows.limit.max_tokens

    def first_sequences(self, step: int) -> list[int]:
        """The first sequence of each row that a step draws, including rows that it will skip."""
        return [row * self._rows.per_row for row in self._drawn(step)]

    def _drawn(self, step: int) -> list[int]:
        num_rows = len(self._rows)
        draws = range((step - 1) * self._batch_size, step * self._batch_size)
        return sorted({int(self._order(draw // num_rows)[draw % num_rows]) for draw in draws})

    def next(self, step: int) -> BatchHandle:
        """This step's batch, on the trainer ranks. ValueError if none of its rows is usable."""
        sizes = self.sizes_of(step)
        return self._trainer.load_rows(step, list(sizes), list(sizes.values()), self._together(sizes))

    def sizes_of(self, step: int) -> dict[int, Sizes]:
        """The usable sequences of this step's rows, with their sizes; sets `stats`. ValueError if there are none."""
        rows, drawn = self._rows, self._drawn(step)
        sizes, num_used, num_long, num_cut = self._sizes(rows, "train", drawn)
        if not sizes:
            why = self._skipped["train", drawn[0]]
            raise ValueError(f"step {step}: none of its {len(drawn)} rows can be learned from; {why}")
        self.stats = {
            "_tokens": scalar(sum(size.total for size in sizes.values())),
            "_samples": scalar(len(sizes)),
            f"{self._metrics}/skipped": scalar(len(drawn) - num_used),
            f"{self._metrics}/too_long": scalar(num_long),
            f"{self._metrics}/cut": scalar(num_cut),
        }
        return sizes

    def held_out(self, step: int) -> BatchHandle | None:
        """The first eval.num_prompts rows of data.val, on the trainer ranks; None if the run computes no loss on them.
        ValueError if none of them is usable."""
        rows = self._held_out
        if rows is None:
            return None
        chosen = range(min(self._num_held_out, len(rows)))
        sizes, *_ = self._sizes(rows, "val", chosen)
        if not sizes:
            raise ValueError(f"none of {len(chosen)} rows of data.val can be used; {self._skipped['val', 0]}")
        given = (step, list(sizes), list(sizes.values()), self._together(sizes))
        return self._trainer.load_rows(*given, batch=HELD_OUT, split="val")

    def mixed(self, batch: BatchHandle) -> BatchHandle:
        """The prompts of a batch of this object, each with an answer of the row before it, as a batch on the trainer
        ranks; the first row's prompt gets the last row's answer."""
        split: Split = "val" if batch.id == HELD_OUT else "train"
        rows = self._held_out if batch.id == HELD_OUT else self._rows
        assert rows is not None, "a batch of held-out rows has been loaded"
        by_row: dict[int, list[int]] = {}
        for sequence in batch.samples:
            by_row.setdefault(sequence // rows.per_row, []).append(sequence)
        found = {row: rows.sequences(row) for row in by_row}
        most = max(size.total for size in batch.sizes.values())
        answers, sizes, before = {}, {}, list(by_row)[-1]
        for row, sequences in by_row.items():
            for place, sequence in enumerate(sequences):
                other = by_row[before][place % len(by_row[before])]
                asked, answered = found[row][sequence % rows.per_row], found[before][other % rows.per_row]
                answers[sequence], sizes[sequence] = other, _sizes_of(with_answer_of(asked, answered, most))
            before = row
        given = (batch.step, list(sizes), list(sizes.values()), self._together(sizes))
        return self._trainer.load_rows(*given, batch=MIXED, split=split, answers=answers)

    def num_skipped(self, split: Split) -> int:
        """Rows of a split that have been skipped so far."""
        return sum(of == split for of, _ in self._skipped)

    def _together(self, sizes: dict[int, Sizes]) -> dict[int, int]:
        """What must stay in one micro-batch."""
        per_row, is_pairs = self._rows.per_row, self._rows.kind == "pairs"
        return {sequence: sequence // per_row for sequence in sizes} if is_pairs else {}

    def _sizes(self, rows: SFTRows, split: str, drawn: Iterable[int]) -> tuple[dict[int, Sizes], int, int, int]:
        """The sizes of all sequences of the usable rows among these, and the numbers of rows that are used, that are
        too long, and that are cut."""
        sizes: dict[int, Sizes] = {}
        num_used = num_long = num_cut = 0
        for row in drawn:
            try:
                sequences, _, tokens_cut = rows.encode(row)
            except BadRow as error:
                num_long += isinstance(error, TooLong)
                self._skip(split, row, str(error))
            else:
                num_used, num_cut = num_used + 1, num_cut + (tokens_cut > 0)
                self._note_cut(rows, split, row, tokens_cut)
                sizes |= {row * rows.per_row + n: _sizes_of(sequence) for n, sequence in enumerate(sequences)}
        return sizes, num_used, num_long, num_cut

    def _skip(self, split: str, row: int, why: str) -> None:
        """Warn once about a row that is skipped."""
        if (split, row) not in self._skipped and len(self._skipped) < MAX_NAMED:
            logger.warning("%s; the row is skipped (counted in %s/skipped)", why, self._metrics)
        self._skipped[split, row] = why

    def _note_cut(self, rows: SFTRows, split: str, row: int, num_tokens: int) -> None:
        """Warn once about a row of which tokens are cut."""
        if num_tokens and (split, row) not in self._cut:
            if len(self._cut) < MAX_NAMED:
                text = "%s: %d tokens over %s are cut (data.overlong_sequences; counted in %s/cut)"
                logger.warning(text, rows.where(row), num_tokens, rows.limit.key, self._metrics)
            self._cut.add((split, row))

    def state_dict(self) -> dict[str, Any]:
        return self._rows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows.load_state_dict(state)

    def held(self) -> dict[int, list[int]]:
        """Empty: no rank holds samples."""
        return {}


def _sizes_of(sequence: TrainedSequence) -> Sizes:
    return Sizes(len(sequence.token_ids), sum(sequence.loss_mask))


def _rows_of(config: Config, split: Split, tokenizer: Any, model: Path | None) -> SFTRows:
    if config.trains_head:
        return HeadRows(config, split, tokenizer)
    return sft_rows(config.data, split, tokenizer, config.seed, config.row_kind, model)
