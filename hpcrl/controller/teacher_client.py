"""The teacher's interface for pipelines: the frozen model from which the policy is distilled."""

from __future__ import annotations

import time

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.controller.batches import BatchHandle
from hpcrl.controller.clients import answers_stats, send_tokens, timed
from hpcrl.messaging import messages
from hpcrl.messaging.dispatcher import Controller
from hpcrl.metrics.stats import Stats, merge

FIELDS = {"sampled": ("teacher_logprobs",)}
"""teacher.form -> the fields of a batch that the teacher fills."""


class Teacher:
    """The teacher ranks, with the model in teacher.path. Does nothing if neither algorithm nor pipeline has a
    teacher."""

    def __init__(self, controller: Controller, layout: RoleLayout, config: Config):
        self._controller, self._config = controller, config
        self.ranks = layout.ranks["teacher"]
        self._division, self._trainers = layout.division("teacher"), layout.division("trainer")

    def teach(self, batch: BatchHandle) -> Stats:
        """Fill what the teacher gives for the batch's tokens in the form of teacher.form, on the trainer ranks."""
        if not self.ranks:
            return {}
        start, rows, fields = time.perf_counter(), batch.rows_of("teacher"), FIELDS[self._config.teacher.form]
        plan = batch.plan(rows, batch.samples, self._config.trainer.max_tokens_per_micro_batch)
        commands = {rank: messages.Teach(batch.id, list(fields), plan[rank]) for rank in rows}
        answers = self._controller.call(self._division.replicate(commands))
        if self.ranks != self._trainers.ranks:
            for field in fields:
                send_tokens(self._controller, batch, field, ("teacher", self._division), ("trainer", self._trainers))
        return merge([answers_stats(answers.values()), timed("time/teacher", start)])
