"""Memory of the native engine's KV cache, and of its products with all experts."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config import Config
from hpcrl.engines.gen.native.spec import NativeConfig
from hpcrl.models.shape import ModelShape
from hpcrl.planner.generator import state_bytes, token_bytes, too_small_cache
from hpcrl.planner.memory_parts import BYTES
from hpcrl.spec.problems import Problem


def cache(config: Config, shape: ModelShape) -> tuple[int, None]:
    """Bytes of the full cache, with the second copy of one layer that exists while the cache grows, and of the states
    of recurrent layers."""
    one, states = _block_bytes(config, shape), _states(config, shape)
    num_blocks, budget = config.generator.max_num_seqs * _longest(config), _budget(config)
    if budget is not None:
        num_blocks = min(num_blocks, (budget - states) // one)
    layers = sum(cache.keys > 0 for cache in shape.caches) or shape.num_layers
    return num_blocks * one + num_blocks * one // layers + states, None


def decoding(config: Config, shape: ModelShape) -> int:
    """Bytes of the products with all experts in a decoding step with deterministic=true, 0 without: of each expert and
    slot the gate and up values, with the inner values and the output or, if they are clamped, four of their parts."""
    if not config.deterministic:
        return 0
    of_expert = 3 * shape.expert_size + shape.hidden_size
    if shape.decoder.biased_experts:
        of_expert = max(of_expert, 6 * shape.expert_size)
    return config.generator.max_num_seqs * shape.num_experts * of_expert * BYTES[config.generator.dtype]


def check(config: Config, shape: ModelShape) -> Iterator[Problem]:
    """Report a KV cache that is too small for one response of full length."""
    least = _longest(config) * _block_bytes(config, shape) + _states(config, shape)
    return too_small_cache(config, "native", _budget(config), least)


def _budget(config: Config) -> int | None:
    return config.generator.section(NativeConfig).kv_cache_bytes


def _block_bytes(config: Config, shape: ModelShape) -> int:
    return token_bytes(config, shape) * config.generator.section(NativeConfig).block_tokens


def _states(config: Config, shape: ModelShape) -> int:
    """Bytes of the states of all slots, and of as many kept ones."""
    return 2 * config.generator.max_num_seqs * state_bytes(config, shape)


def _longest(config: Config) -> int:
    """Blocks of the longest sequence."""
    return -(-config.max_sequence_tokens // config.generator.section(NativeConfig).block_tokens)
