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
from hpcrl.models.families import shape_of


def widths_of(config: Config) -> dict[str, int]:
    """The fields of a batch that a teacher of this form (teacher.form) fills -> numbers per token; 0: a single number.
    CannotPlanError if the form needs the teacher's sizes and teacher.path cannot be read."""
    teacher = config.teacher
    match teacher.form:
        case "sampled":
            return {"teacher_logprobs": 0}
        case "top_k":
            return dict.fromkeys(("teacher_topk_ids", "teacher_topk_logprobs"), teacher.top_k)
        case "full":
            return {"teacher_states": shape_of(teacher.path or "", "teacher.path").hidden_size}


class Teacher:
    """The teacher ranks, with the model in teacher.path. Does nothing if the run has no teacher."""

    def __init__(self, controller: Controller, layout: RoleLayout, config: Config):
        self._controller, self._config = controller, config
        self.ranks = layout.ranks["teacher"]
        self._division, self._trainers = layout.division("teacher"), layout.division("trainer")
        self._widths = widths_of(config) if self.ranks else {}

    def teach(self, batch: BatchHandle) -> Stats:
        """Fill what the teacher gives for the batch's tokens in the form of teacher.form, on the trainer ranks."""
        if not self.ranks:
            return {}
        start, rows, widths = time.perf_counter(), batch.rows_of("teacher"), self._widths
        plan = batch.plan(rows, batch.samples, self._config.trainer.max_tokens_per_micro_batch)
        commands = {rank: messages.Teach(batch.id, widths, plan[rank]) for rank in rows}
        answers = self._controller.call(self._division.replicate(commands))
        if self.ranks != self._trainers.ranks:
            source, dest = ("teacher", self._division), ("trainer", self._trainers)
            for field, width in widths.items():
                send_tokens(self._controller, batch, field, source, dest, width)
        return merge([answers_stats(answers.values()), timed("time/teacher", start)])
