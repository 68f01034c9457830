"""The teacher role: frozen models that judge the tokens of a batch, each those of its domains, as teacher.form says."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcrl.config.teacher_paths import teachers
from hpcrl.engines.train.training_engine import TrainEngine
from hpcrl.messaging.messages import Done, LoadTeacher, Teach
from hpcrl.models.shape import decoder_keys
from hpcrl.rollout.batch import Batch, MicroBatches
from hpcrl.spec.trajectory import FIELDS
from hpcrl.workers.mixing import unfilled
from hpcrl.workers.self_teaching import judge
from hpcrl.workers.teacher_reading import judge_reading
from hpcrl.workers.trainer import EngineRole

UNKNOWN = -20.0
"""Log-prob of a token that the teacher's vocabulary lacks. Its probability is 0, so its log would be infinite."""


class TeacherRole(EngineRole):
    """The models in teacher.path or teacher.paths, each with an engine of its own, which work one after another; or an
    earlier policy (teacher.sync_every)."""

    name = "teacher"

    def _make_engine(self, model_path: Path) -> TrainEngine:
        config = self._worker.config
        folders = [Path(folder) for folder in teachers(config.teacher)] or [model_path]
        self._nums_rows = [_vocabulary_rows(folder) for folder in folders]
        first, *self._others = [self._make(config.of_teacher(str(folder)), folder) for folder in folders]
        return first

    @property
    def engines(self) -> list[TrainEngine]:
        """See EngineRole."""
        return [self.engine, *self._others]

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return super().handlers() | {Teach: self._teach, LoadTeacher: self._load}

    def _load(self, command: LoadTeacher, seq: int) -> Done:
        del self.engine, self._others
        gc.collect()  # frees the old engine's memory before the new engine needs it
        self.engine = self._make_engine(Path(command.folder))
        return Done(seq)

    def _teach(self, command: Teach, seq: int) -> Done:
        batch = self._worker.batches[command.batch]
        if not command.micro_batches:  # no row of the step has a teacher
            for name, width in command.widths.items():
                setattr(batch, name, _unjudged(batch, name, width))
            return Done(seq)
        rows = torch.zeros(batch.num_sequences, dtype=torch.bool)
        rows[[row for micro_batch in command.micro_batches for row in micro_batch]] = True
        judged = judge_reading(command.prompts, batch, lambda read: self._judge(read, command))
        for (name, width), values in zip(command.widths.items(), judged, strict=True):
            if values is not None and width:  # another teacher's states may be wider
                values = torch.nn.functional.pad(values, (0, width - values.shape[1]))
            found = self._ranks.outputs(values, batch.num_tokens, width, getattr(torch, FIELDS[name].dtype))
            if not bool(rows.all()):
                known = batch.columns[name] if name in batch.columns else _unjudged(batch, name, width)
                chosen = rows[batch.row_ids]
                found = torch.where(chosen[:, None] if width else chosen, found, known, out=known)
            setattr(batch, name, found)
        return Done(seq)

    def _judge(self, batch: Batch, command: Teach) -> Sequence[Tensor | None]:
        """The values of the form's fields; None on ranks that hold no outputs."""
        config, temperature = self._worker.config, self._algorithm.objective.temperature
        engine, micro_batches = self.engines[command.teacher], command.micro_batches
        if config.teacher.form == "sampled":
            return [self._logprobs(engine, self._nums_rows[command.teacher], batch, micro_batches, temperature)]
        return judge(config, engine, batch, micro_batches, temperature)

    def _logprobs(
        self, engine: TrainEngine, num_rows: int | None, batch: Batch, micro_batches: MicroBatches, temperature: float
    ) -> Tensor | None:
        """See TrainEngine. The policy may have drawn a row of its vocabulary that pads it beyond the teacher's, which
        has num_rows: the teacher reads token 0 instead, and gives UNKNOWN."""
        if num_rows is None or not bool((unknown := batch.token_ids >= num_rows).any()):
            return engine.logprobs(batch, micro_batches, temperature)
        read = replace(batch, columns=batch.columns | {"token_ids": batch.token_ids.masked_fill(unknown, 0)})
        values = engine.logprobs(read, micro_batches, temperature)
        return None if values is None else values.masked_fill(unknown & batch.loss_mask, UNKNOWN)


def _unjudged(batch: Batch, name: str, width: int) -> Tensor:
    """A field that no teacher has filled yet."""
    like = torch.empty((0, width) if width else 0, dtype=getattr(torch, FIELDS[name].dtype))
    return unfilled(FIELDS[name], batch.num_tokens, like)


def _vocabulary_rows(folder: Path) -> int | None:
    """Rows of a model's vocabulary; None if its config.json does not say."""
    found: int | None = decoder_keys(json.loads((folder / "config.json").read_text())).get("vocab_size")
    return found
