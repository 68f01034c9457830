"""The teacher's interface for pipelines: the models from which the policy is distilled."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.config.teacher_checks import lacks_teacher
from hpcrl.config.teacher_paths import DEFAULT, teacher_of
from hpcrl.controller.batches import BatchHandle
from hpcrl.controller.clients import Trainer, answers_stats, send_tokens, timed
from hpcrl.controller.policy_copy import PolicyCopy
from hpcrl.controller.teacher_prompts import as_read, prompts_of
from hpcrl.messaging import messages
from hpcrl.messaging.dispatcher import Controller
from hpcrl.metrics.stats import Stats, merge
from hpcrl.planner.taught_memory import states_width


def widths_of(config: Config) -> dict[str, int]:
    """The fields of a batch that a teacher of this form (teacher.form) fills -> numbers per token; 0: a single number.
    CannotPlanError if the form needs the teachers' sizes and a folder cannot be read."""
    teacher = config.teacher
    match teacher.form:
        case "sampled":
            return {"teacher_logprobs": 0}
        case "top_k":
            return dict.fromkeys(("teacher_topk_ids", "teacher_topk_logprobs"), teacher.top_k)
        case "full":
            return {"teacher_states": states_width(config)}


class Teacher:
    """The teacher ranks, with the models in teacher.path or teacher.paths or an earlier policy (teacher.sync_every); or
    the trainer ranks, if their engine computes the teacher's values. Does nothing if the run has no teacher."""

    def __init__(self, controller: Controller, layout: RoleLayout, config: Config, run_dir: Path):
        self._controller, self._config = controller, config
        role = "trainer" if config.teacher_is_trainer else "teacher"
        self.ranks = layout.ranks[role]
        self._division, self._trainers = layout.division(role), layout.division("trainer")
        self._widths = widths_of(config) if self.ranks else {}
        self._copy = PolicyCopy(run_dir, "teacher", self._load)

    def teach(self, batch: BatchHandle) -> Stats:
        """Fill what the teachers give for the batch's tokens in the form of teacher.form, on the trainer ranks; each
        judges the rows of its domains. ValueError if a domain would learn from a teacher, and has none."""
        if not self.ranks:
            return {}
        start, rows, widths = time.perf_counter(), batch.rows_of("teacher"), self._widths
        read = as_read(batch)
        answers: list[messages.Done] = []
        for number, samples in samples_of_teachers(self._config, batch).items():
            plan = read.plan(rows, samples, self._config.trainer.max_tokens_per_micro_batch) if samples else {}
            commands = {
                rank: messages.Teach(batch.id, widths, plan.get(rank, []), number, prompts_of(batch, own))
                for rank, own in rows.items()
            }
            answers += self._controller.call(self._division.replicate(commands)).values()
        if self.ranks != self._trainers.ranks:
            source, dest = ("teacher", self._division), ("trainer", self._trainers)
            for field, width in widths.items():
                send_tokens(self._controller, batch, field, source, dest, width)
        return merge([answers_stats(answers), timed("time/teacher", start)])

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


def samples_of_teachers(config: Config, batch: BatchHandle) -> dict[int, list[int]]:
    """Number of a teacher -> the samples that it judges; no samples of the first if none judges any. ValueError if a
    domain would learn from a teacher, and has none."""
    if lacking := [why for domain in batch.domains if (why := lacks_teacher(config, domain))]:
        raise ValueError(lacking[0])
    own = {prompt: teacher_of(config.teacher, name) for name, ids in batch.domains.items() for prompt in ids}
    others, found = teacher_of(config.teacher, DEFAULT), dict[int, list[int]]()
    for sample in batch.samples:
        if (number := own.get(batch.prompts.get(sample, sample), others)) is not None:
            found.setdefault(number, []).append(sample)
    return dict(sorted(found.items())) or {0: []}
