"""Memory of vLLM's KV cache."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config import Config
from hpcrl.engines.gen.vllm.spec import VLLMConfig
from hpcrl.planner.generator import token_bytes
from hpcrl.planner.shapes import ModelShape
from hpcrl.spec.problems import Problem

BLOCK_TOKENS = 128
"""Tokens of a block on a CPU; blocks on GPUs are smaller."""


def cache(config: Config, shape: ModelShape) -> tuple[int, int]:
    """Bytes of the cache on one rank, for all slots at full length unless generator.vllm.kv_cache_gib says how many;
    and the least that vLLM starts with."""
    given = config.generator.section(VLLMConfig).kv_cache_gib
    if given is not None:
        return int(given * 2**30), int(given * 2**30)
    blocks, block = _longest(config), _block_bytes(config, shape)
    return (config.generator.max_slots * blocks + 1) * block, (blocks + 1) * block


def check(config: Config, shape: ModelShape) -> Iterator[Problem]:
    """A cache that does not hold one response of full length."""
    given = config.generator.section(VLLMConfig).kv_cache_gib
    least = (_longest(config) + 1) * _block_bytes(config, shape)
    if given is not None and given * 2**30 < least:
        needed = f"{config.max_sequence_tokens} tokens, the longest prompt and response, need {least / 2**30:.4g}"
        way_out = "raise it, or lower data.max_prompt_tokens or rollout.max_new_tokens"
        yield Problem(
            ("generator", "vllm", "kv_cache_gib"),
            f"generator.vllm.kv_cache_gib: {given:.4g} GiB of KV cache, but {needed}; {way_out}",
            (("rollout", "max_new_tokens"), ("data", "max_prompt_tokens"), ("model",)),
        )


def _longest(config: Config) -> int:
    """Blocks of the longest sequence."""
    return -(-config.max_sequence_tokens // BLOCK_TOKENS)


def _block_bytes(config: Config, shape: ModelShape) -> int:
    return BLOCK_TOKENS * token_bytes(config, shape)
