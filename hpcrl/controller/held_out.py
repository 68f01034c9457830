"""Validation of a model with one output per token on rows of data.val, by the trainer ranks."""

from __future__ import annotations

import logging
import time
from typing import Any

from hpcrl.config import Config
from hpcrl.controller.clients import Trainer, timed
from hpcrl.controller.supervised import MAX_NAMED, rows_together, sizes_of
from hpcrl.data import HeadRows
from hpcrl.metrics.stats import Stats, merge, scalar

logger = logging.getLogger(__name__)


class HeldOutRows:
    """The objective's statistics of the first eval.num_prompts rows of data.val, a training batch of rows at a time."""

    def __init__(self, trainer: Trainer, config: Config, tokenizer: Any):
        self._trainer, self._size = trainer, config.head_training.batch_size
        self._rows = HeadRows(config, "val", tokenizer)
        self._count = min(len(self._rows), config.eval.num_prompts)
        self._skipped: dict[int, str] = {}

    def scores(self, step: int) -> Stats:
        """The statistics under val/ in place of the objective's prefix, such as val/accuracy. Between two steps."""
        start, found = time.perf_counter(), []
        for first in range(0, self._count, self._size):
            drawn = range(first, min(first + self._size, self._count))
            sizes = sizes_of(self._rows, drawn, self._skip)
            if not sizes:
                continue
            together = rows_together(self._rows, sizes)
            batch = self._trainer.load_rows(step, list(sizes), list(sizes.values()), together, split="val")
            found.append(self._trainer.score_rows(batch))
            self._trainer.drop(batch)
        stats = {f"val/{name.partition('/')[2]}": stat for name, stat in merge(found).items()}
        return merge([stats, {"val/rows_skipped": scalar(len(self._skipped))}, timed("time/val_step", start)])

    def before_and_after(self, last: int) -> str:
        """Empty: no rank generates completions to show."""
        return ""

    def _skip(self, row: int, why: str) -> None:
        """Warn once about a row that is skipped."""
        if row not in self._skipped and len(self._skipped) < MAX_NAMED:
            logger.warning("%s; the row is skipped (counted in val/rows_skipped)", why)
        self._skipped[row] = why
