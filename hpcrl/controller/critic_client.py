"""The critic's interface for pipelines. A call is a few commands in one total order."""

from __future__ import annotations

import time
from pathlib import Path

from hpcrl.algorithms.factory import make_value_loss
from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.controller.batches import BatchHandle
from hpcrl.controller.clients import answers_stats, send_tokens, timed, updates
from hpcrl.messaging import messages
from hpcrl.messaging.dispatcher import Controller
from hpcrl.metrics.stats import Stats, merge


class Critic:
    """The critic ranks, which may be the trainer's. Does nothing if the algorithm has no critic."""

    def __init__(self, controller: Controller, layout: RoleLayout, config: Config):
        self._controller, self._config = controller, config
        self._division, self._trainers = layout.division("critic"), layout.division("trainer")
        self._is_apart = self._division.ranks != self._trainers.ranks
        self.ranks = self._division.ranks

    def values(self, batch: BatchHandle) -> Stats:
        """Fill the batch's field `values`, also on the trainer ranks."""
        if not self.ranks:
            return {}
        start, rows = time.perf_counter(), batch.rows_of("critic")
        plan = batch.plan(rows, batch.samples, self._config.trainer.max_tokens_per_micro_batch)
        commands = {rank: messages.Values(batch.id, plan[rank]) for rank in rows}
        answers = self._controller.call(self._division.replicate(commands))
        if self._is_apart:
            send_tokens(self._controller, batch, "values", ("critic", self._division), ("trainer", self._trainers))
        return merge([answers_stats(answers.values()), timed("time/values", start)])

    def update(self, batch: BatchHandle) -> Stats:
        """Take a batch's optimizer steps on the advantage estimator's returns, with the policy's numbers of epochs and
        mini-batches."""
        if not self.ranks:
            return {}
        start = time.perf_counter()
        if self._is_apart:
            send_tokens(self._controller, batch, "returns", ("trainer", self._trainers), ("critic", self._division))
            weights = {
                rank: [(sample, batch.weights[sample]) for sample in samples if sample in batch.weights]
                for rank, samples in batch.rows_of("critic").items()
            }
            weigh = {rank: messages.SetSampleWeights(batch.id, pairs) for rank, pairs in weights.items()}
            self._controller.call(self._division.replicate(weigh))
        epochs = make_value_loss(self._config).num_epochs
        stats, _ = updates(
            self._controller, self._config, "critic", self._division, batch, epochs, messages.TrainCritic
        )
        return merge([stats, timed("time/critic_train", start)])

    def export(self, folder: Path) -> None:
        """Write the critic in HF layout, as a transformers token classification model with one label."""
        if self.ranks:
            self._controller.call({rank: messages.ExportCritic(str(folder)) for rank in self.ranks})
