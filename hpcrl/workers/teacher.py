"""The teacher role: a frozen model that judges the tokens of a batch, in the form of teacher.form."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcrl.engines.train.training_engine import TrainEngine
from hpcrl.messaging.messages import Done, LoadTeacher, Teach
from hpcrl.models.shape import decoder_keys
from hpcrl.rollout.batch import Batch, MicroBatches
from hpcrl.spec.trajectory import FIELDS
from hpcrl.workers.teacher_reading import judge_reading
from hpcrl.workers.trainer import EngineRole

UNKNOWN = -20.0
"""Log-prob of a token that the teacher's vocabulary lacks. Its probability is 0, so its log would be infinite."""


class TeacherRole(EngineRole):
    """The model in teacher.path, or an earlier policy (teacher.sync_every)."""

    name = "teacher"

    def _make_engine(self, model_path: Path) -> TrainEngine:
        own = self._worker.config.of_teacher()
        folder = Path(self._worker.config.teacher.path or model_path)
        self._num_rows = decoder_keys(json.loads((folder / "config.json").read_text())).get("vocab_size")
        return self._make(own, folder)

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return super().handlers() | {Teach: self._teach, LoadTeacher: self._load}

    def _load(self, command: LoadTeacher, seq: int) -> Done:
        del self.engine
        gc.collect()  # frees the old engine's memory before the new engine needs it
        self.engine = self._make_engine(Path(command.folder))
        return Done(seq)

    def _teach(self, command: Teach, seq: int) -> Done:
        batch = self._worker.batches[command.batch]
        judged = judge_reading(command.prompts, batch, lambda read: self._judge(read, command.micro_batches))
        for (name, width), values in zip(command.widths.items(), judged, strict=True):
            dtype = getattr(torch, FIELDS[name].dtype)
            setattr(batch, name, self._ranks.outputs(values, batch.num_tokens, width, dtype))
        return Done(seq)

    def _judge(self, batch: Batch, micro_batches: MicroBatches) -> Sequence[Tensor | None]:
        """The values of the form's fields; None on ranks that hold no outputs."""
        teacher, temperature = self._worker.config.teacher, self._algorithm.objective.temperature
        engine: Any = self.engine  # its specification declares the forms (TrainEngineSpec.teaches)
        match teacher.form:
            case "sampled":
                return [self._logprobs(batch, micro_batches, temperature)]
            case "top_k":
                return engine.top_k(batch, micro_batches, teacher.top_k, temperature) or [None, None]
            case "full":
                return [engine.final_states(batch, micro_batches)]

    def _logprobs(self, batch: Batch, micro_batches: MicroBatches, temperature: float) -> Tensor | None:
        """See TrainEngine. The policy may have drawn a row of its vocabulary that pads it beyond the teacher's: the
        teacher reads token 0 instead, and gives UNKNOWN."""
        if self._num_rows is None or not bool((unknown := batch.token_ids >= self._num_rows).any()):
            return self.engine.logprobs(batch, micro_batches, temperature)
        read = replace(batch, columns=batch.columns | {"token_ids": batch.token_ids.masked_fill(unknown, 0)})
        values = self.engine.logprobs(read, micro_batches, temperature)
        return None if values is None else values.masked_fill(unknown & batch.loss_mask, UNKNOWN)
