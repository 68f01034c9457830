"""The teacher's interface for pipelines: the model from which the policy is distilled."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.controller.batches import BatchHandle
from hpcrl.controller.clients import Trainer, answers_stats, send_tokens, timed
from hpcrl.controller.policy_copy import PolicyCopy
from hpcrl.controller.teacher_prompts import as_read, prompts_of
from hpcrl.messaging import messages
from hpcrl.messaging.dispatcher import Controller
from hpcrl.metrics.stats import Stats, merge
from hpcrl.planner.taught_memory import taught_by


def widths_of(config: Config) -> dict[str, int]:
    """The fields of a batch that a teacher of this form (teacher.form) fills -> numbers per token; 0: a single number.
    CannotPlanError if the form needs the teacher's sizes and its folder cannot be read."""
    teacher = config.teacher
    match teacher.form:
        case "sampled":
            return {"teacher_logprobs": 0}
        case "top_k":
            return dict.fromkeys(("teacher_topk_ids", "teacher_topk_logprobs"), teacher.top_k)
        case "full":
            return {"teacher_states": taught_by(config).hidden_size}


class Teacher:
    """The teacher ranks, with the model in teacher.path or an earlier policy (teacher.sync_every); or the trainer
    ranks, if their engine computes the teacher's values. Does nothing if the run has no teacher."""

    def __init__(self, controller: Controller, layout: RoleLayout, config: Config, run_dir: Path):
        self._controller, self._config = controller, config
        role = "trainer" if config.teacher_is_trainer else "teacher"
        self.ranks = layout.ranks[role]
        self._division, self._trainers = layout.division(role), layout.division("trainer")
        self._widths = widths_of(config) if self.ranks else {}
        self._copy = PolicyCopy(run_dir, "teacher", self._load)

    def teach(self, batch: BatchHandle) -> Stats:
        """Fill what the teacher gives for the batch's tokens in the form of teacher.form, on the trainer ranks."""
        if not self.ranks:
            return {}
        start, rows, widths = time.perf_counter(), batch.rows_of("teacher"), self._widths
        plan = as_read(batch).plan(rows, batch.samples, self._config.trainer.max_tokens_per_micro_batch)
        commands = {
            rank: messages.Teach(batch.id, widths, plan[rank], prompts_of(batch, own)) for rank, own in rows.items()
        }
        answers = self._controller.call(self._division.replicate(commands))
        if self.ranks != self._trainers.ranks:
            source, dest = ("teacher", self._division), ("trainer", self._trainers)
            for field, width in widths.items():
                send_tokens(self._controller, batch, field, source, dest, width)
        return merge([answers_stats(answers.values()), timed("time/teacher", start)])

    def update(self, step: int, trainer: Trainer) -> Stats:
        """If due, export this step's policy in HF layout and load it as the teacher (teacher.sync_every); a resumed run
        loads the same export."""
        return self._copy.update(step, trainer) if self._every and step % self._every == 0 else {}

    def state_dict(self) -> dict[str, Any]:
        """The step whose policy is the teacher, if it is one; JSON-able."""
        return self._copy.state_dict() if self._every else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. ValueError if the teacher's folder is gone."""
        if self._every:
            self._copy.load_state_dict(state)

    @property
    def _every(self) -> int:
        """Steps between updates; 0: the teacher is never updated."""
        teacher = self._config.teacher
        return (teacher.sync_every or 0) if self.ranks and teacher.source == "policy" else 0

    def _load(self, folder: Path) -> None:
        load, more_s = messages.LoadTeacher(str(folder)), self._config.timeouts.start_s
        self._controller.call(dict.fromkeys(self.ranks, load), more_s)
        if self._config.teacher.form == "full":
            head = messages.LoadTeacherHead(str(folder))
            self._controller.call(dict.fromkeys(self._trainers.ranks, head), more_s)
