"""Batches for pipelines that train on the answers in their data."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hpcrl.config import Config
from hpcrl.controller.batches import BatchHandle
from hpcrl.controller.clients import Trainer
from hpcrl.data import HeadRows, SFTRows, epoch_order, sft_rows
from hpcrl.data.files import BadRow
from hpcrl.metrics.stats import Stats, scalar
from hpcrl.rollout.types import Sizes

logger = logging.getLogger(__name__)

MAX_NAMED = 10
"""Maximum number of skipped rows named in the log; further ones are only counted."""


class AnswerRows:
    """Rows of the training data, in a different order each epoch; the step determines its rows. Rows that prove
    unusable only when tokenized are skipped: their steps have fewer rows. Sequence n belongs to row n // per_row
    (hpcrl.data.answers); all sequences of a row are in one micro-batch."""

    def __init__(self, trainer: Trainer, config: Config, tokenizer: Any):
        assert config.pipeline_spec.batch_size is not None, "a pipeline without prompts has rows"
        self._trainer, self._batch_size = trainer, config.pipeline_spec.batch_size(config)
        rows: SFTRows
        if config.trains_head:
            rows = HeadRows(config, "train", tokenizer)
        else:
            rows = sft_rows(config.data, "train", tokenizer, config.seed, config.pipeline_spec.pairs)
        self._rows = rows
        self._order = functools.lru_cache(2)(lambda epoch: epoch_order(config.seed, "sft", epoch, len(rows)))
        self._skipped: dict[int, str] = {}
        self.stats: Stats = {}

    def next(self, step: int) -> BatchHandle:
        """This step's batch, on the trainer ranks. ValueError if none of its rows is usable."""
        sizes, per_row = self.sizes_of(step), self._rows.per_row
        together = {sequence: sequence // per_row for sequence in sizes} if per_row > 1 else {}
        return self._trainer.load_rows(step, list(sizes), list(sizes.values()), together)

    def sizes_of(self, step: int) -> dict[int, Sizes]:
        """The usable sequences of this step's rows, with their sizes; sets `stats`. ValueError if there are none."""
        rows = self._rows
        draws = range((step - 1) * self._batch_size, step * self._batch_size)
        drawn = sorted({int(self._order(draw // len(rows))[draw % len(rows)]) for draw in draws})
        sizes = sizes_of(rows, drawn, self._skip)
        if not sizes:
            raise ValueError(
                f"step {step}: none of its {len(drawn)} rows can be learned from; {self._skipped[drawn[0]]}"
            )
        self.stats = {
            "_tokens": scalar(sum(size.total for size in sizes.values())),
            "_samples": scalar(len(sizes)),
            "rows/skipped": scalar(len(drawn) - len(sizes) // rows.per_row),
        }
        return sizes

    def _skip(self, row: int, why: str) -> None:
        """Warn once about a row that is skipped."""
        if row not in self._skipped and len(self._skipped) < MAX_NAMED:
            logger.warning("%s; the row is skipped (counted in rows/skipped)", why)
        self._skipped[row] = why

    def state_dict(self) -> dict[str, Any]:
        return self._rows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows.load_state_dict(state)

    def held(self) -> dict[int, list[int]]:
        """Empty: no rank holds samples."""
        return {}


def sizes_of(rows: SFTRows, drawn: Sequence[int], skip: Callable[[int, str], None]) -> dict[int, Sizes]:
    """Sequence -> its size, for all sequences of the drawn rows; `skip` is called for a row that proves unusable, with
    the reason."""
    sizes: dict[int, Sizes] = {}
    for row in drawn:
        try:
            sequences = rows.sequences(row)
        except BadRow as error:
            skip(row, str(error))
        else:
            first = row * rows.per_row
            sizes |= {first + n: Sizes(len(s.token_ids), sum(s.loss_mask)) for n, s in enumerate(sequences)}
    return sizes


def rows_together(rows: SFTRows, sequences: Iterable[int]) -> dict[int, int]:
    """Sequence -> its row, if rows have several sequences, which are then in one micro-batch."""
    return {sequence: sequence // rows.per_row for sequence in sequences} if rows.per_row > 1 else {}
