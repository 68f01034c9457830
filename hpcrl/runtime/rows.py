"""The batches of a pipeline that learns from the answers of its data."""

from __future__ import annotations

import functools
from typing import Any

from hpcrl.config import Config
from hpcrl.data import epoch_order, sft_rows
from hpcrl.metrics.stats import Stats, scalar
from hpcrl.rollout.types import Sizes
from hpcrl.runtime.batches import BatchHandle
from hpcrl.runtime.parts import Trainer


class AnswerRows:
    """Rows of the training data, each epoch in its own order; the step determines its rows."""

    def __init__(self, trainer: Trainer, config: Config, tokenizer: Any):
        assert config.pipeline_spec.batch_size is not None, "a pipeline without prompts has rows"
        self._trainer, self._batch_size = trainer, config.pipeline_spec.batch_size(config)
        self._rows = rows = sft_rows(config.data, "train", tokenizer, config.seed)
        self._order = functools.lru_cache(2)(lambda epoch: epoch_order(config.seed, "sft", epoch, len(rows)))
        self.stats: Stats = {}

    def next(self, step: int) -> BatchHandle:
        """The batch of this step, on the trainer ranks."""
        rows = self._rows
        draws = range((step - 1) * self._batch_size, step * self._batch_size)
        chosen = sorted({int(self._order(draw // len(rows))[draw % len(rows)]) for draw in draws})
        encoded = [rows.row(row) for row in chosen]
        sizes = [Sizes(len(token_ids), sum(mask)) for token_ids, mask in encoded]
        self.stats = {"_tokens": scalar(sum(size.total for size in sizes)), "_samples": scalar(len(sizes))}
        return self._trainer.load_rows(step, chosen, sizes)

    def state_dict(self) -> dict[str, Any]:
        return self._rows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows.load_state_dict(state)

    def held(self) -> dict[int, list[int]]:
        """Empty: no rank holds samples."""
        return {}
