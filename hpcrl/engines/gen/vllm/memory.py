"""Memory of vLLM's KV cache."""

from __future__ import annotations

from hpcrl.config import Config
from hpcrl.engines.gen.vllm.spec import VLLMConfig
from hpcrl.planner.generator import token_bytes
from hpcrl.planner.shapes import ModelShape

BLOCK_TOKENS = 128
"""Tokens of a block on a CPU; blocks on GPUs are smaller."""


def cache(config: Config, shape: ModelShape) -> tuple[int, int]:
    """Bytes of the cache on one rank, for all slots at full length unless generator.vllm.kv_cache_gib says how many;
    and the least that vLLM starts with."""
    blocks = -(-config.max_sequence_tokens // BLOCK_TOKENS)
    block = BLOCK_TOKENS * token_bytes(config, shape)
    given = config.generator.section(VLLMConfig).kv_cache_gib
    if given is not None:
        return int(given * 2**30), int(given * 2**30)
    return (config.generator.max_slots * blocks + 1) * block, (blocks + 1) * block
