"""Experts without groups in vLLM's CPU build."""

from __future__ import annotations

from typing import Any


def route_in_one_group(model: Any) -> None:
    """Let CPU routers of experts without groups compute as with one group of all experts, which is the same function.
    vLLM 0.32's router for CPUs ignores the correction bias of experts without groups (Ernie 4.5), and has no sigmoid
    scores for them (MiniMax-M2)."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    for runner in (module for module in model.modules() if isinstance(module, MoERunner)):
        router = runner.router
        if not isinstance(router, CPURouter) or router.use_grouped_topk or router.custom_routing_function is not None:
            continue
        if router.scoring_func == "sigmoid" or (
            router.scoring_func == "softmax" and router.e_score_correction_bias is not None
        ):
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1
