"""Check attention head sizes on a CPU, since vLLM itself detects a missing kernel only in its first iteration."""

from __future__ import annotations

from typing import Any

import torch


def check_head_size(config: Any) -> None:
    """ValueError if vLLM's attention has no kernel on this CPU for the model's head size. `config` is a VllmConfig."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if not current_platform.is_cpu() or config.model_config.use_mla:
        return
    size = config.model_config.get_head_size()
    if not _takes(config, size):
        taken = ", ".join(str(s) for s in CPUAttentionBackend.get_supported_head_sizes() if _takes(config, s))
        raise ValueError(
            f"its attention heads have size {size}, and vLLM's kernels for this CPU support {taken}; "
            "generator.engine=native supports any size"
        )


def _takes(config: Any, size: int) -> bool:
    """Whether the kernels support this head size, tested by planning an iteration of one token."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = config.model_config, config.cache_config
    try:
        ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=model.get_num_attention_heads(config.parallel_config),
            num_kv_heads=model.get_num_kv_heads(config.parallel_config),
            head_dim=size,
            seq_lens=torch.ones(1, dtype=torch.int32),
            dtype=model.dtype,
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            causal=True,
            sliding_window_size=-1,
            isa=_get_attn_isa(model.dtype, cache.block_size, size, cache.cache_dtype),
            enable_kv_split=False,
        )
    except RuntimeError as error:
        if "Unsupported CPU attention" not in str(error):
            raise
        return False
    return True
