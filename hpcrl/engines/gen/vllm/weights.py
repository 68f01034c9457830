"""Repairs of vLLM's CPU build after new weights."""

from __future__ import annotations

from typing import Any

import torch


def repair_after_load(model: Any) -> None:
    """The CPU build multiplies by packed copies of the weights, and vLLM packs neither a tied head nor experts anew."""
    if torch.cuda.is_available():
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is not None and embedding is not None and head is not embedding and model.config.tie_word_embeddings:
        head.weight.data = embedding.weight.data
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if isinstance(experts := getattr(kernel, "fused_experts", None), CPUUnquantizedExperts):
            experts.process_weights_after_loading(layer)
