"""Multi-head latent attention (arXiv 2405.04434) in Megatron-Core's configuration."""

from __future__ import annotations

from typing import Any

from hpcrl.models.shape import ModelShape


def latent_options(shape: ModelShape, hf: Any) -> dict[str, Any]:
    """Keys of MLATransformerConfig from `hf`, transformers' configuration. The rotary embedding's frequencies, yarn's
    included, are set in the model; here, yarn only changes the scale of scores."""
    latent, rope = shape.latent, getattr(hf, "rope_parameters", None) or {}
    assert latent is not None
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_head_dim": latent.nope,
        "qk_pos_emb_head_dim": latent.rope,
        "v_head_dim": latent.value,
        "rope_type": "rope",
        "rotary_scaling_factor": float(rope.get("factor") or 1.0),
        "mscale_all_dim": float(rope.get("mscale_all_dim") or 0.0),
    }
