"""Rotary embeddings on a CPU."""

from __future__ import annotations

from typing import Any


def rotate_all_heads(config: Any) -> None:
    """Let vLLM rotate in torch. `config` is a VllmConfig. Given queries as [tokens, heads, width], as latent attention
    and LFM2 give them, the kernel of vLLM 0.32 for CPUs takes the first rows of tokens and heads for the tokens, and
    leaves all others unrotated."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        config.compilation_config.custom_ops.append("-rotary_embedding")
