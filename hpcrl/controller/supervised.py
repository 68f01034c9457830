"""Batches for pipelines that train on the answers in their data."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.controller.batches import BatchHandle
from hpcrl.controller.clients import Trainer
from hpcrl.data import epoch_order, sft_rows
from hpcrl.data.files import BadRow
from hpcrl.data.row_lengths import TooLong
from hpcrl.metrics.stats import Stats, scalar
from hpcrl.rollout.types import Sizes

logger = logging.getLogger(__name__)

MAX_NAMED = 10
"""Maximum number of skipped rows named in the log; further ones are only counted."""


class AnswerRows:
    """Rows of the training data, in a different order each epoch; the step determines its rows. Rows that prove
    unusable or too long only when tokenized are skipped: their steps have fewer rows. Sequence n belongs to row
    n // per_row (hpcrl.data.answers); both sequences of a pair are in one micro-batch.

    Args:
        model: The model's folder, whose context limits the rows.
    """

    def __init__(self, trainer: Trainer, config: Config, tokenizer: Any, model: Path | None = None):
        assert config.pipeline_spec.batch_size is not None, "a pipeline without prompts has rows"
        self._trainer, self._batch_size = trainer, config.pipeline_spec.batch_size(config)
        self._rows = rows = sft_rows(config.data, "train", tokenizer, config.seed, config.row_kind, model)
        self._order = functools.lru_cache(2)(lambda epoch: epoch_order(config.seed, "sft", epoch, len(rows)))
        self._skipped: dict[int, str] = {}
        self._cut: set[int] = set()
        self.stats: Stats = {}
        if rows.num_left_out:
            logger.warning("%d rows of data.train are left out (data.unusable_rows=drop)", rows.num_left_out)
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
        rows, drawn = self._rows, self._drawn(step)
        sizes: dict[int, Sizes] = {}
        num_used = num_long = num_cut = 0
        for row in drawn:
            try:
                sequences, _, tokens_cut = rows.encode(row)
            except BadRow as error:
                num_long += isinstance(error, TooLong)
                self._skip(row, str(error))
            else:
                num_used, num_cut = num_used + 1, num_cut + (tokens_cut > 0)
                self._note_cut(row, tokens_cut)
                first = row * rows.per_row
                sizes |= {first + n: Sizes(len(s.token_ids), sum(s.loss_mask)) for n, s in enumerate(sequences)}
        if not sizes:
            raise ValueError(
                f"step {step}: none of its {len(drawn)} rows can be learned from; {self._skipped[drawn[0]]}"
            )
        self.stats = {
            "_tokens": scalar(sum(size.total for size in sizes.values())),
            "_samples": scalar(len(sizes)),
            "rows/skipped": scalar(len(drawn) - num_used),
            "rows/too_long": scalar(num_long),
            "rows/cut": scalar(num_cut),
        }
        together = {sequence: sequence // rows.per_row for sequence in sizes} if rows.kind == "pairs" else {}
        return self._trainer.load_rows(step, list(sizes), list(sizes.values()), together)

    def _skip(self, row: int, why: str) -> None:
        """Warn once about a row that is skipped."""
        if row not in self._skipped and len(self._skipped) < MAX_NAMED:
            logger.warning("%s; the row is skipped (counted in rows/skipped)", why)
        self._skipped[row] = why

    def _note_cut(self, row: int, num_tokens: int) -> None:
        """Warn once about a row of which tokens are cut."""
        if num_tokens and row not in self._cut:
            if len(self._cut) < MAX_NAMED:
                text = "%s: %d tokens over %s are cut (data.overlong_sequences; counted in rows/cut)"
                logger.warning(text, self._rows.where(row), num_tokens, self._rows.limit.key)
            self._cut.add(row)

    def state_dict(self) -> dict[str, Any]:
        return self._rows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows.load_state_dict(state)

    def held(self) -> dict[int, list[int]]:
        """Empty: no rank holds samples."""
        return {}
