"""The embedded engine: continuous batching in the rank's process, with torch only."""

from __future__ import annotations

from hpcrl.spec.kinds import GenEngineSpec

SPEC = GenEngineSpec(
    about="The embedded engine: continuous batching in the rank's process, with torch only.",
    make="hpcrl.engines.gen.native.engine:make",
    families=("qwen2", "qwen3", "qwen3_moe", "llama"),
)
