"""Small models of families that vLLM has, in sizes that its kernels for CPUs take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
LATENT: dict[str, Any] = {  # vLLM's kernel for CPUs takes only 512 + 64 numbers per token
    "num_key_value_heads": 2,
    "head_dim": None,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
}
WINDOWS: dict[str, Any] = {
    "sliding_window": 16,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA4: dict[str, Any] = WINDOWS | {
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 32,
}
CONVOLUTIONS: dict[str, Any] = {"layer_types": ["conv", "full_attention"], "tie_word_embeddings": True}
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT
    | SHARED
    | {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "num_experts_per_tok": 3},
    "deepseek_v3": LATENT | SHARED | {"n_group": 4, "topk_group": 2},
    "deepseek_v32": LATENT | SHARED | {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 16},
    "ernie4_5": {},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 2,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
    "gemma2": WINDOWS | {"query_pre_attn_scalar": 32},
    "gemma3_text": WINDOWS | {"query_pre_attn_scalar": 32},
    "gemma4_text": GEMMA4,
    "gemma4_text experts": GEMMA4
    | {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
    | {"moe_intermediate_size": 32},
    "glm4_moe": SHARED | {"use_qk_norm": True},
    "glm4_moe_lite": LATENT | SHARED | {"mlp_layer_types": ["dense", "sparse"]},
    "glm_moe_dsa": LATENT | SHARED | {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 16},
    "gpt_oss": LOCAL | {"sliding_window": 16},
    "granitemoe": LOCAL,
    "granitemoehybrid": LOCAL
    | {"layer_types": ["mamba", "attention"], "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 16}
    | {"mamba_n_groups": 1, "mamba_expand": 1, "shared_intermediate_size": 32},
    "hunyuan_v1_dense": {},
    "lfm2": CONVOLUTIONS | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": CONVOLUTIONS | EXPERTS | {"num_dense_layers": 1},
    "llama4_text": LOCAL
    | {
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 32,
    }
    | {"no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"]},
    "minimax_m2": LOCAL
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "mixtral": LOCAL,
    "nemotron_h": MAMBA | {"layers_block_type": ["mamba", "attention", "mlp"]},
    "nemotron_h experts": MAMBA
    | {"layers_block_type": ["mamba", "attention", "moe"], "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1},
    "olmo2": {},
    "olmo3": {"sliding_window": 16},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_next": DELTA | EXPERTS | {"shared_expert_intermediate_size": 32},
    "seed_oss": {},
}
"""Changes to SIZES. The first word of a key is the model_type."""


def make_folder(family: str, folder: Path) -> Path:
    """In HF layout, with weights large enough for every part to matter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {name: size for name, size in (SIZES | CHANGES[family]).items() if size is not None}
    torch.manual_seed(1)
    config = AutoConfig.for_model(family.partition(" ")[0], **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith((".A_log", ".dt_bias", ".D", "layer_scalar")):
                tensor.uniform_(0.2, 1.0)
            elif tensor.ndim > 1:
                tensor.normal_(std=0.4 if "conv" in name else tensor.shape[-1] ** -0.5)
            elif name.endswith(("bias", "sinks")):  # new ones are zero
                tensor.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def named(model: Any) -> dict[str, Any]:
    """What a trainer sends: weights and persistent buffers as in memory, tied ones once."""
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), name)
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name in set(first.values())}
