"""What SGLang asks of a model of a given shape: memory of its KV cache, and tokens that truncated sampling keeps."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config import Config
from hpcrl.engines.gen.sglang.spec import MOST_KEPT, TRUNCATED, SGLangConfig
from hpcrl.planner.generator import paged_cache, token_bytes
from hpcrl.planner.shapes import ModelShape
from hpcrl.spec.problems import Problem

SPARE_TOKENS = 8
"""By how much a sequence must be shorter than SGLang's context and its cache."""


def cache(config: Config, shape: ModelShape) -> tuple[int, int]:
    """Bytes of the cache on one rank: generator.sglang.kv_cache_gib or all slots at full length; and the least."""
    given = config.generator.section(SGLangConfig).kv_cache_gib
    return paged_cache(config, shape) if given is None else (int(given * 2**30), int(given * 2**30))


def cache_tokens(config: Config, shape: ModelShape) -> int | None:
    """Tokens that generator.sglang.kv_cache_gib holds; None without it."""
    given = config.generator.section(SGLangConfig).kv_cache_gib
    return None if given is None else int(given * 2**30) // token_bytes(config, shape)


def check(config: Config, shape: ModelShape) -> Iterator[Problem]:
    """A budget that does not hold one response of full length; truncated sampling without log-probs."""
    tokens, least, rollout = cache_tokens(config, shape), config.max_sequence_tokens + SPARE_TOKENS, config.rollout
    if tokens is not None and tokens < least:
        text = f"holds {tokens} tokens, but the longest prompt and response need {least}"
        way_out = "raise it, or lower data.max_prompt_tokens or rollout.max_new_tokens"
        yield Problem(
            ("generator", "sglang", "kv_cache_gib"),
            f"generator.sglang.kv_cache_gib: {text}; {way_out}",
            (("rollout", "max_new_tokens"), ("data", "max_prompt_tokens"), ("model",)),
        )
    if rollout.top_p < 1 and not rollout.top_k and shape.vocab_size > MOST_KEPT:
        text = f"0, with rollout.top_p={rollout.top_p:g}, but {TRUNCATED}; use {MOST_KEPT}"
        yield Problem(("rollout", "top_k"), f"rollout.top_k: {text}", (("rollout", "top_p"), ("model",)))
