"""SGLang; the first rank of a replica owns the engine."""

from __future__ import annotations

from hpcrl.spec.kinds import GenEngineSpec

SPEC = GenEngineSpec(
    about="SGLang; the first rank of a replica owns the engine.",
    needs={"sglang": "sglang"},
    tensor_parallel=True,
    plan="hpcrl.planner.generator:paged_cache",
    sleeps=True,
)
