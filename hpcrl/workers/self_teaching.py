"""The trainer's engine in the place of a teacher: the policy, or the policy without its adapters (teacher.source)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hpcrl.config import Config
from hpcrl.engines.train.training_engine import TrainEngine
from hpcrl.rollout.batch import Batch, MicroBatches


def judge(
    config: Config, engine: TrainEngine, batch: Batch, micro_batches: MicroBatches, temperature: float
) -> Sequence[Tensor | None]:
    """The values of the fields of teacher.form; None on ranks that hold no outputs. Collective over the engine's
    ranks."""
    own: Any = engine  # its specification declares adapters and forms (TrainEngineSpec.teaches)
    is_base = config.teacher.source == "base" and config.lora is not None
    with own.without_adapters() if is_base else contextlib.nullcontext():
        match config.teacher.form:
            case "sampled":
                return [engine.logprobs(batch, micro_batches, temperature)]
            case "top_k":
                return own.top_k(batch, micro_batches, config.teacher.top_k, temperature) or [None, None]
            case "full":
                return [own.final_states(batch, micro_batches)]
