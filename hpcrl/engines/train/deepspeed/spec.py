"""DeepSpeed ZeRO."""

from __future__ import annotations

from hpcrl.spec.kinds import TrainEngineSpec

SPEC = TrainEngineSpec(about="DeepSpeed ZeRO.", needs={"deepspeed": "deepspeed"}, computes=frozenset({"entropy"}))
