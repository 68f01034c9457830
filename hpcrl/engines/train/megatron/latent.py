"""DeepSeek-V3 (arXiv 2412.19437) in Megatron-Core's configuration: multi-head latent attention, shared experts, and
routers with sigmoid scores and a bias per expert that only affects the choice."""

from __future__ import annotations

from typing import Any

from hpcrl.models.shape import ModelShape


def latent_options(shape: ModelShape, hf: Any) -> dict[str, Any]:
    """Keys of MLATransformerConfig from `hf`, transformers' configuration. The rotary embedding's frequencies, yarn's
    included, are set in the model; here, yarn only changes the scale of scores."""
    latent, rope = shape.latent, getattr(hf, "rope_parameters", None) or {}
    assert latent is not None
    options: dict[str, Any] = {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_head_dim": latent.nope,
        "qk_pos_emb_head_dim": latent.rope,
        "v_head_dim": latent.value,
        "rope_type": "rope",
        "rotary_scaling_factor": float(rope.get("factor") or 1.0),
        "mscale_all_dim": float(rope.get("mscale_all_dim") or 0.0),
        "moe_shared_expert_intermediate_size": shape.shared_size,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": float(hf.routed_scaling_factor),
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # RouterBias updates the bias, after the weights
    }
    if (hf.n_group or 1) > 1:
        options |= {"moe_router_num_groups": hf.n_group, "moe_router_group_topk": hf.topk_group}
    return options
