"""vLLM, in the rank's own process."""

from __future__ import annotations

from hpcrl.spec.kinds import GenEngineSpec

SPEC = GenEngineSpec(
    about="vLLM, in the rank's own process.",
    needs={"vllm": "vllm"},
    tensor_parallel=True,
    plan="hpcrl.planner.generator:paged_cache",
    sleeps=True,
)
