"""The embedded engine: continuous batching in the rank's process, with torch only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcrl.engines.gen.native.unsupported import unsupported
from hpcrl.models.families import NATIVE
from hpcrl.spec.fields import Positive, PositiveFloat, Section
from hpcrl.spec.kinds import GenEngineSpec
from hpcrl.spec.media import IMAGE
from hpcrl.spec.problems import Problem

KEPT_IMAGE_TOKENS = 65_536
LARGE_BLOCK = 4096  # tokens; up to this a bucket may exceed the longest sequence


class NativeConfig(Section):
    """The memory of the embedded engine."""

    block_tokens: Positive = 32
    """Tokens of a block of the KV cache; responses with a common prefix share blocks."""
    kv_cache_gib: PositiveFloat | None = None
    """Maximum memory of the KV cache, with recurrent layers' states, GiB; responses wait while it is full; null:
    max_num_seqs at full length."""

    @property
    def kv_cache_bytes(self) -> int | None:
        """kv_cache_gib in bytes."""
        return None if self.kv_cache_gib is None else int(self.kv_cache_gib * 2**30)


def _check(config: Any) -> Iterator[Problem]:
    bucket, longest = config.generator.section(NativeConfig).block_tokens, config.max_sequence_tokens
    if bucket > max(longest, LARGE_BLOCK):
        text = f"{bucket} tokens of cache per response, but the longest has {longest}; use less"
        yield Problem(
            ("generator", "native", "block_tokens"),
            f"generator.native.block_tokens: {text}",
            (("rollout", "max_new_tokens"), ("data", "max_prompt_tokens")),
        )


SPEC = GenEngineSpec(
    about="The embedded engine: continuous batching in the rank's process, with torch only.",
    make="hpcrl.engines.gen.native.engine:make",
    section=NativeConfig,
    resume_keys=("block_tokens", "kv_cache_gib"),
    check=_check,
    plan="hpcrl.engines.gen.native.memory:cache",
    decoding_plan="hpcrl.engines.gen.native.memory:decoding",
    check_sizes="hpcrl.engines.gen.native.memory:check",
    families=NATIVE,
    media=frozenset({IMAGE}),
    kept_image_tokens=KEPT_IMAGE_TOKENS,
    unsupported=unsupported,
    records_routes=True,
    recompute=True,
    keeps_weights=True,
    shares_weights=True,
    deterministic=True,
    float32_head=True,
    lora=True,
    several_in_process=True,
)
