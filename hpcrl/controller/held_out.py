"""Validation of a model with one output per token on rows of data.val, by the trainer ranks."""

from __future__ import annotations

import time

from hpcrl.controller.clients import Trainer, timed
from hpcrl.controller.supervised import AnswerRows
from hpcrl.metrics.stats import Stats, merge, scalar


class HeldOutRows:
    """The objective's statistics of the first eval.num_prompts rows of data.val."""

    def __init__(self, trainer: Trainer, rows: AnswerRows):
        self._trainer, self._rows = trainer, rows

    def scores(self, step: int) -> Stats:
        """The statistics under val/ in place of the objective's prefix, such as val/accuracy. Between two steps."""
        start, batch = time.perf_counter(), self._rows.held_out(step)
        assert batch is not None, "built only for a run that validates rows"
        stats = {f"val/{name.partition('/')[2]}": stat for name, stat in self._trainer.loss_stats(batch).items()}
        self._trainer.drop(batch)
        skipped = {"val/rows_skipped": scalar(self._rows.num_skipped("val"))}
        return merge([stats, skipped, timed("time/val_step", start)])

    def before_and_after(self, last: int) -> str:
        """Empty: no rank generates completions to show."""
        return ""
