"""FSDP2 of torch, on any decoder that transformers has."""

from __future__ import annotations

from hpcrl.spec.kinds import TrainEngineSpec

SPEC = TrainEngineSpec(
    about="FSDP2 of torch, on any decoder that transformers has.",
    make="hpcrl.engines.train.fsdp2.engine:make",
    plan="hpcrl.engines.train.fsdp2.memory:PLAN",
)
