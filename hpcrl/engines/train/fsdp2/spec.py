"""PyTorch FSDP2, for any decoder of transformers."""

from __future__ import annotations

from hpcrl.spec.kinds import TrainEngineSpec

SPEC = TrainEngineSpec(
    about="PyTorch FSDP2, for any decoder of transformers.",
    make="hpcrl.engines.train.fsdp2.engine:make",
    plan="hpcrl.engines.train.fsdp2.memory:PLAN",
)
