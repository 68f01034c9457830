"""Rows of answers that are trained on beside the rollouts of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.controller.batches import BatchHandle, assign_rows
from hpcrl.controller.clients import Trainer
from hpcrl.controller.supervised import AnswerRows
from hpcrl.data.rows import require_same
from hpcrl.messaging.dispatcher import Controller
from hpcrl.messaging.messages import MixRows
from hpcrl.metrics.stats import Stats, scalar
from hpcrl.rollout.types import ANSWER_IDS


class Imitation:
    """The rows of imitation.data. The step determines its rows, so a checkpoint only identifies the data. The
    context of the model in the folder `model` limits their length."""

    def __init__(
        self,
        controller: Controller,
        layout: RoleLayout,
        config: Config,
        trainer: Trainer,
        tokenizer: Any,
        model: Path | None = None,
    ):
        self._controller, self._division = controller, layout.division("trainer")
        self._rows: AnswerRows | None = None
        if config.imitates:
            own = config.of_imitation()
            self._rows = AnswerRows(trainer, own, tokenizer, model, source="imitation.data", metrics="imitation")

    def mix(self, batch: BatchHandle) -> Stats:
        """Add the step's rows to the batch on the trainer ranks, divided over its mini-batches; without imitation.data
        do nothing. Called last before the trainer's update: the rows have neither advantages nor log-probs of other
        models."""
        if self._rows is None:
            return {}
        sizes = {ANSWER_IDS + number: size for number, size in self._rows.sizes_of(batch.step).items()}
        count = len(batch.mini_batches)
        parts = [sorted(sizes)[first::count] for first in range(count)]
        shares = assign_rows(sizes, parts, sorted(batch.rows))
        batch.sizes = {**batch.sizes, **sizes}
        batch.mini_batches = [[*old, *new] for old, new in zip(batch.mini_batches, parts, strict=True)]
        batch.rows = {rank: [*samples, *shares[rank]] for rank, samples in batch.rows.items()}
        mixes = {rank: MixRows(batch.id, [number - ANSWER_IDS for number in own]) for rank, own in shares.items()}
        self._controller.call(self._division.replicate(mixes))
        return {
            "imitation/rows": scalar(len(sizes)),
            "imitation/tokens": scalar(sum(size.model for size in sizes.values())),
            **{name: value for name, value in self._rows.stats.items() if not name.startswith("_")},
        }

    def state_dict(self) -> dict[str, Any]:
        """Identification of the data; JSON-able."""
        return {} if self._rows is None else {"imitation": self._rows.state_dict()["cursor"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError names the source that differs from the checkpoint."""
        if self._rows is not None:
            require_same(state["imitation"], self._rows.state_dict()["cursor"], "imitation.data")
