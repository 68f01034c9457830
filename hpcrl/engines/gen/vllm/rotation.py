"""Rotary embeddings of latent attention on a CPU."""

from __future__ import annotations

from typing import Any


def rotate_all_heads(config: Any) -> None:
    """Let vLLM rotate in torch. `config` is a VllmConfig. Given queries as [tokens, heads, width], which only latent
    attention has, the kernel of vLLM 0.32 for CPUs rotates the first head and leaves the others."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and getattr(config.model_config.hf_text_config, "qk_rope_head_dim", None):
        config.compilation_config.custom_ops.append("-rotary_embedding")
