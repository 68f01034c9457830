"""The sizes of well-known models as in their published config.json, without keys that change no size."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.planner.models import PUBLISHED, published


class Model(NamedTuple):
    """A config.json, and billions of parameters: in total, without layers that predict further tokens, and for each
    token (None if it is all of them)."""

    config: dict[str, Any]
    total: float
    active: float | None = None


UNTIED = {"tie_word_embeddings": False}
FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def latent(query: int | None = None, nope: int = 128, rope: int = 64, value: int = 128) -> dict[str, Any]:
    return {
        "q_lora_rank": query,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
    }


def routed(count: int, chosen: int, inner: int, shared: int, dense: int, **more: Any) -> dict[str, Any]:
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": inner,
        "n_shared_experts": shared,
        "first_k_dense_replace": dense,
        **more,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    sizes = {"num_local_experts": experts, "num_experts_per_tok": 4, "head_dim": 64, "sliding_window": 128}
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    more = {"layer_types": kinds, "attention_bias": True, **UNTIED, **MXFP4, **sizes}
    return published("gpt_oss", 2880, layers, 64, 8, 2880, 201088, **more)


def _linear(value_heads: int, key_heads: int = 16) -> dict[str, Any]:
    return {
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "full_attention_interval": 4,
        "head_dim": 256,
    }


def _tower(out: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5",
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "out_hidden_size": out,
        "deepstack_visual_indexes": [],
    }


GATED = {"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
GROUPED = {"n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "num_nextn_predict_layers": 1}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
    "vision_use_head": False,
}
NEMOTRON = {
    "head_dim": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "use_conv_bias": True,
}

WELL_KNOWN: dict[str, Model] = {name: Model(config, count / 1e9) for name, (config, count) in PUBLISHED.items()} | {
    "Llama-3.1-70B": Model(published("llama", 8192, 80, 64, 8, 28672, 128256, **UNTIED), 70.55),
    "Phi-4": Model(published("phi3", 5120, 40, 40, 10, 17920, 100352, **UNTIED), 14.66),
    "Qwen1.5-MoE-A2.7B": Model(
        published(
            *("qwen2_moe", 2048, 24, 16, 16, 5632, 151936),
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            decoder_sparse_step=1,
            **UNTIED,
        ),
        14.3,
        2.7,
    ),
    "Qwen3-Next-80B-A3B": Model(
        published(
            *("qwen3_next", 2048, 48, 16, 2, 5120, 151936),
            num_experts=512,
            num_experts_per_tok=10,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            **_linear(32),
            **UNTIED,
        ),
        79.7,
        3.9,
    ),
    "Qwen3.5-9B": Model(
        {
            "model_type": "qwen3_5",
            "text_config": published("qwen3_5_text", 4096, 32, 16, 4, 12288, 248320, **_linear(32)),
            "vision_config": _tower(4096),
            **UNTIED,
        },
        9.4,
    ),
    "Qwen3.5-35B-A3B": Model(
        {
            "model_type": "qwen3_5_moe",
            "text_config": published(
                *("qwen3_5_moe_text", 2048, 40, 16, 2, 5120, 248320),
                num_experts=256,
                num_experts_per_tok=8,
                moe_intermediate_size=512,
                shared_expert_intermediate_size=512,
                **_linear(32),
            ),
            "vision_config": _tower(2048) | {"model_type": "qwen3_5_moe"},
            **UNTIED,
        },
        35.1,
        3.9,
    ),
    "Llama-4-Scout": Model(
        published(
            *("llama4_text", 5120, 48, 40, 8, 8192, 202048),
            intermediate_size_mlp=16384,
            head_dim=128,
            num_local_experts=16,
            num_experts_per_tok=1,
            interleave_moe_layer_step=1,
            **UNTIED,
        ),
        107.8,
        17.2,
    ),
    "Mixtral-8x7B": Model(
        published(
            "mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2, sliding_window=None
        ),
        46.7,
        12.9,
    ),
    "gpt-oss-20b": Model(_gpt_oss(24, 32), 20.9, 4.2),
    "gpt-oss-120b": Model(_gpt_oss(36, 128), 116.8, 5.7),
    "DeepSeek-V2-Lite": Model(
        published(
            *("deepseek_v2", 2048, 27, 16, 16, 10944, 102400),
            **latent(),
            **routed(64, 6, 1408, 2, 1, n_group=1, topk_group=1, topk_method="greedy", moe_layer_freq=1),
        ),
        15.7,
        2.66,
    ),
    "DeepSeek-V3": Model(
        published(
            *("deepseek_v3", 7168, 61, 128, 128, 18432, 129280),
            **latent(1536),
            **routed(256, 8, 2048, 1, 3),
            **GROUPED,
            **FP8,
        ),
        671.0,
        37.6,
    ),
    "DeepSeek-V3.2": Model(
        published(
            *("deepseek_v32", 7168, 61, 128, 128, 18432, 129280),
            **latent(1536),
            **routed(256, 8, 2048, 1, 3),
            **GROUPED,
            **FP8,
            index_head_dim=128,
            index_n_heads=64,
            index_topk=2048,
        ),
        671.9,
        38.4,
    ),
    "Moonlight-16B-A3B": Model(
        published(
            *("deepseek_v3", 2048, 27, 16, 16, 11264, 163840),
            **latent(),
            **routed(64, 6, 1408, 2, 1),
            **GATED,
            auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        ),
        15.96,
        2.9,
    ),
    "Kimi-K2": Model(
        published(
            *("kimi_k2", 7168, 61, 64, 64, 18432, 163840),
            **latent(1536),
            **routed(384, 8, 2048, 1, 1),
            **GATED,
            **FP8,
            auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        ),
        1026.5,
        33.0,
    ),
    "GLM-4.5-Air": Model(
        published(
            *("glm4_moe", 4096, 46, 96, 8, 10944, 151552),
            **routed(128, 8, 1408, 1, 1),
            **GATED,
            **UNTIED,
            head_dim=128,
            attention_bias=True,
            use_qk_norm=False,
            partial_rotary_factor=0.5,
        ),
        106.85,
        13.4,
    ),
    "GLM-4.6": Model(
        published(
            *("glm4_moe", 5120, 92, 96, 8, 12288, 151552),
            **routed(160, 8, 1536, 1, 3),
            **GATED,
            **UNTIED,
            head_dim=128,
            attention_bias=True,
            use_qk_norm=True,
            partial_rotary_factor=0.5,
        ),
        352.8,
        33.6,
    ),
    "GLM-4.7-Flash": Model(
        published(
            *("glm4_moe_lite", 2048, 47, 20, 20, 10240, 154880),
            **latent(768, 192, 64, 256),
            **routed(64, 4, 1536, 1, 1),
            **GATED,
            **UNTIED,
        ),
        29.9,
        3.9,
    ),
    "GLM-5": Model(
        published(
            *("glm_moe_dsa", 6144, 78, 64, 64, 12288, 154880),
            **latent(2048, 192, 64, 256),
            **routed(256, 8, 2048, 1, 3),
            **GATED,
            **UNTIED,
            index_head_dim=128,
            index_n_heads=32,
            index_topk=2048,
        ),
        744.0,
        41.8,
    ),
    "MiniMax-M2": Model(
        published(
            *("minimax_m2", 3072, 62, 48, 8, 1536, 200064),
            head_dim=128,
            num_local_experts=256,
            num_experts_per_tok=8,
            rotary_dim=64,
            use_qk_norm=True,
            **UNTIED,
            **FP8,
        ),
        228.7,
        11.0,
    ),
    "Nemotron-H-8B": Model(
        published(
            *("nemotron_h", 4096, 52, 32, 8, 21504, 131072),
            hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            mamba_num_heads=128,
            **NEMOTRON,
            **UNTIED,
        ),
        8.1,
    ),
    "Nemotron-3-Nano-30B-A3B": Model(
        published(
            *("nemotron_h", 2688, 52, 32, 2, 1856, 131072),
            hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            mamba_num_heads=64,
            n_routed_experts=128,
            num_experts_per_tok=6,
            moe_intermediate_size=1856,
            moe_shared_expert_intermediate_size=3712,
            n_shared_experts=1,
            **NEMOTRON,
            **UNTIED,
        ),
        31.6,
        3.6,
    ),
    "Falcon-H1-7B": Model(
        published(
            *("falcon_h1", 3072, 44, 12, 2, 12288, 130048),
            head_dim=128,
            mamba_d_ssm=3072,
            mamba_n_heads=24,
            mamba_d_head=128,
            mamba_n_groups=1,
            mamba_d_state=256,
            mamba_d_conv=4,
            **UNTIED,
        ),
        7.59,
    ),
    "Granite-4.0-H-Tiny": Model(
        published(
            *("granitemoehybrid", 1536, 40, 12, 4, 512, 100352),
            layer_types=["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
            shared_intermediate_size=1024,
            num_local_experts=64,
            num_experts_per_tok=6,
            mamba_n_heads=48,
            mamba_d_head=64,
            mamba_d_state=128,
            mamba_n_groups=1,
            mamba_d_conv=4,
            mamba_expand=2,
            tie_word_embeddings=True,
        ),
        6.94,
        1.47,
    ),
    "LFM2-1.2B": Model(
        published(
            *("lfm2", 2048, 16, 32, 8, 12288, 65536),
            full_attn_idxs=[2, 5, 8, 10, 12, 14],
            block_ff_dim=12288,
            block_auto_adjust_ff_dim=True,
            block_ffn_dim_multiplier=1.0,
            block_multiple_of=256,
            conv_L_cache=3,
            tie_embedding=True,
        ),
        1.17,
    ),
    "gemma-3-27b": Model(
        {
            "model_type": "gemma3",
            "text_config": published("gemma3_text", 5376, 62, 32, 16, 21504, 262208, head_dim=128, sliding_window=1024),
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 256,
        },
        27.43,
    ),
    "gemma-4-31b": Model(
        {
            "model_type": "gemma4_text",
            **published("gemma4_text", 5376, 60, 32, 16, 21504, 262144),
            "head_dim": 256,
            "global_head_dim": 512,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "sliding_window": 1024,
        },
        30.7,
    ),
    "Seed-OSS-36B": Model(
        published(
            *("seed_oss", 5120, 64, 80, 8, 27648, 155136),
            head_dim=128,
            attention_bias=True,
            attention_out_bias=False,
            **UNTIED,
        ),
        36.15,
    ),
    "OLMo-3-7B": Model(published("olmo3", 4096, 32, 32, 32, 11008, 100278, sliding_window=4096, **UNTIED), 7.3),
    "ERNIE-4.5-0.3B": Model(published("ernie4_5", 1024, 18, 16, 2, 3072, 103424, head_dim=128), 0.36),
    "ERNIE-4.5-21B-A3B": Model(
        published(
            *("ernie4_5_moe", 2560, 28, 20, 4, 12288, 103424),
            moe_num_experts=64,
            moe_k=6,
            moe_intermediate_size=1536,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            moe_layer_interval=1,
        ),
        21.83,
        3.35,
    ),
    "Hunyuan-7B": Model(
        published("hunyuan_v1_dense", 4096, 32, 32, 8, 14336, 128167, head_dim=128, tie_word_embeddings=True), 7.5
    ),
    "Hunyuan-A13B": Model(
        published(
            *("hunyuan_v1_moe", 4096, 32, 32, 8, 3072, 128167),
            head_dim=128,
            num_experts=64,
            moe_topk=[8] * 32,
            num_shared_expert=[1] * 32,
            moe_intermediate_size=[3072] * 32,
            tie_word_embeddings=True,
        ),
        80.4,
        13.0,
    ),
}
