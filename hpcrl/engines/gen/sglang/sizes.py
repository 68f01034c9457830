"""SGLang's requirements for a model's shape: KV cache memory, and the number of tokens that truncation keeps."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config import Config
from hpcrl.engines.gen.sglang.spec import MAX_KEPT, TRUNCATED, SGLangConfig
from hpcrl.models.shape import ModelShape
from hpcrl.planner.generator import paged_cache, state_bytes, token_bytes, too_small_cache
from hpcrl.spec.problems import Problem

SPARE_TOKENS = 8
"""A sequence must be this many tokens shorter than SGLang's context and its cache."""


def cache(config: Config, shape: ModelShape) -> tuple[int, int]:
    """(bytes, minimum bytes) of the cache on one rank: generator.sglang.kv_cache_gib or all slots at full length."""
    given = config.generator.section(SGLangConfig).kv_cache_gib
    return paged_cache(config, shape) if given is None else (int(given * 2**30), int(given * 2**30))


def cache_tokens(config: Config, shape: ModelShape) -> int | None:
    """Tokens that fit into generator.sglang.kv_cache_gib; None without it, and for a model without keys and values."""
    given, one = config.generator.section(SGLangConfig).kv_cache_gib, token_bytes(config, shape)
    return None if given is None or not one else int(given * 2**30) // one


def check(config: Config, shape: ModelShape) -> Iterator[Problem]:
    """Report a cache that is too small for one full-length response; truncation for which SGLang returns no log-probs;
    and a mixture of experts with a tied head, for which SGLang would create a separate head without weights."""
    given, rollout = config.generator.section(SGLangConfig).kv_cache_gib, config.rollout
    least = (config.max_sequence_tokens + SPARE_TOKENS) * token_bytes(config, shape) + state_bytes(config, shape)
    yield from too_small_cache(config, "sglang", None if given is None else int(given * 2**30), least)
    if rollout.top_p < 1 and not rollout.top_k and shape.vocab_size > MAX_KEPT:
        text = f"0, with rollout.top_p={rollout.top_p:g}, but {TRUNCATED}; use {MAX_KEPT}"
        yield Problem(("rollout", "top_k"), f"rollout.top_k: {text}", (("rollout", "top_p"), ("model",)))
    if shape.tied and shape.expert_layers:
        text = "its head is its embedding, which SGLang does not do for mixtures of experts; use native or vllm"
        yield Problem(
            ("generator", "engine"), f"generator.engine: sglang cannot run {shape.family}: {text}", (("model",),)
        )
