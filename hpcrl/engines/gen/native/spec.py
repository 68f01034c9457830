"""The embedded engine: continuous batching in the rank's process, with torch only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcrl.engines.gen.native.families import FAMILIES, unsupported
from hpcrl.spec.fields import Positive, Section
from hpcrl.spec.kinds import GenEngineSpec
from hpcrl.spec.problems import Problem

LARGE_BUCKET = 4096  # tokens; up to this a bucket may exceed the longest sequence


class NativeConfig(Section):
    """The memory of the embedded engine."""

    kv_bucket: Positive = 32
    """KV cache lengths are rounded up to this many tokens."""


def _check(config: Any) -> Iterator[Problem]:
    bucket, longest = config.generator.section(NativeConfig).kv_bucket, config.max_sequence_tokens
    if bucket > max(longest, LARGE_BUCKET):
        text = f"{bucket} tokens of cache per response, but the longest has {longest}; use less"
        yield Problem(
            ("generator", "native", "kv_bucket"),
            f"generator.native.kv_bucket: {text}",
            (("rollout", "max_new_tokens"), ("data", "max_prompt_tokens")),
        )


SPEC = GenEngineSpec(
    about="The embedded engine: continuous batching in the rank's process, with torch only.",
    make="hpcrl.engines.gen.native.engine:make",
    section=NativeConfig,
    resume_keys=("kv_bucket",),
    check=_check,
    plan="hpcrl.engines.gen.native.memory:cache",
    families=tuple(FAMILIES),
    unsupported=unsupported,
    gives_routes=True,
    recompute=True,
    shares_weights=True,
    deterministic=True,
    float32_head=True,
)
