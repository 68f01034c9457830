"""Memory of the native engine's KV cache."""

from __future__ import annotations

from hpcrl.config import Config
from hpcrl.engines.gen.native.spec import NativeConfig
from hpcrl.planner.generator import token_bytes
from hpcrl.planner.shapes import ModelShape


def cache(config: Config, shape: ModelShape) -> tuple[int, None]:
    """Bytes of the cache with all slots in use; it cannot run with less."""
    return token_bytes(config, shape) * config.generator.max_slots * capacity(config), None


def capacity(config: Config) -> int:
    """Maximum positions per slot; the cache grows by half whenever it is too short."""
    bucket = config.generator.section(NativeConfig).kv_bucket
    longest = -(-config.max_sequence_tokens // bucket) * bucket
    grown = max(0, longest - bucket) * 3 // 2
    return max(longest, -(-grown // bucket) * bucket)
