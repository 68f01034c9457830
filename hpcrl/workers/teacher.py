"""The teacher role: a frozen model that judges the tokens of a batch, in the form of teacher.form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from hpcrl.engines.train.training_engine import TrainEngine
from hpcrl.messaging.messages import Done, Teach
from hpcrl.rollout.batch import Batch, MicroBatches
from hpcrl.workers.trainer import EngineRole


class TeacherRole(EngineRole):
    """The model in teacher.path."""

    name = "teacher"

    def _make_engine(self, model_path: Path) -> TrainEngine:
        own = self._worker.config.of_teacher()
        return self._make(own, Path(own.model.path or model_path))

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return super().handlers() | {Teach: self._teach}

    def _teach(self, command: Teach, seq: int) -> Done:
        batch = self._worker.batches[command.batch]
        judged = self._judge(batch, command.micro_batches)
        for name, values in zip(command.fields, judged, strict=True):
            setattr(batch, name, self._ranks.outputs(values, batch.num_tokens))
        return Done(seq)

    def _judge(self, batch: Batch, micro_batches: MicroBatches) -> tuple[Tensor | None, ...]:
        """The values of the form's fields, on ranks that hold outputs."""
        return (self.engine.logprobs(batch, micro_batches, self._algorithm.objective.temperature),)
