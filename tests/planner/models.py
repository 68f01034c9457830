"""The sizes of published models, as in their config.json."""

from __future__ import annotations

from typing import Any

from hpcrl.spec.kinds import TrainEngineSpec


def published(
    family: str, hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, **more: Any
) -> dict[str, Any]:
    """A config.json."""
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        **more,
    }


EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128, "tie_word_embeddings": False}
VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_chans": 3,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
DEEP_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}


def deep(family: str, out: int, **text: Any) -> dict[str, Any]:
    """The config.json of a Qwen3-VL whose tower ends in this width."""
    vision = {**DEEP_VISION, "out_hidden_size": out}
    return {"model_type": family, "text_config": text, "vision_config": vision, "tie_word_embeddings": False}


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2.5-0.5B": (
        published("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True),
        494_032_768,
    ),
    "Qwen2.5-7B": (
        published("qwen2", 3584, 28, 28, 4, 18944, 152064, tie_word_embeddings=False),
        7_615_616_512,
    ),
    "Qwen3-0.6B": (
        published("qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True),
        596_049_920,
    ),
    "Qwen3-8B": (
        published("qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128, tie_word_embeddings=False),
        8_190_735_360,
    ),
    "Qwen3-30B-A3B": (
        published("qwen3_moe", 2048, 48, 32, 4, 6144, 151936, moe_intermediate_size=768, **EXPERTS),
        30_532_122_624,
    ),
    "Qwen3-235B-A22B": (
        published("qwen3_moe", 4096, 94, 64, 4, 12288, 151936, moe_intermediate_size=1536, **EXPERTS),
        235_093_634_560,
    ),
    "Llama-3-8B": (
        published("llama", 4096, 32, 32, 8, 14336, 128256, tie_word_embeddings=False),
        8_030_261_248,
    ),
    "Llama-3.2-1B": (
        published("llama", 2048, 16, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "gemma-2-2b": (published("gemma2", 2304, 26, 8, 4, 9216, 256000, head_dim=256), 2_614_341_888),
    "gemma-2-9b": (published("gemma2", 3584, 42, 16, 8, 14336, 256000, head_dim=256), 9_241_705_984),
    "gemma-3-1b": (published("gemma3_text", 1152, 26, 4, 1, 6912, 262144, head_dim=256), 999_885_952),
    "Mistral-7B": (published("mistral", 4096, 32, 32, 8, 14336, 32000), 7_241_732_096),
    "Ministral-8B": (published("ministral", 4096, 36, 32, 8, 12288, 131072, head_dim=128), 8_019_808_256),
    "Phi-3-mini": (published("phi3", 3072, 32, 32, 32, 8192, 32064), 3_821_079_552),
    "Qwen2.5-VL-7B": (
        published("qwen2_5_vl", 3584, 28, 28, 4, 18944, 152064, tie_word_embeddings=False, vision_config=VISION),
        8_292_166_656,
    ),
    "Qwen3-VL-8B": (
        deep("qwen3_vl", 4096, **published("qwen3_vl_text", 4096, 36, 32, 8, 12288, 151936, head_dim=128)),
        8_767_123_696,
    ),
    "Qwen3-VL-30B-A3B": (
        deep(
            "qwen3_vl_moe",
            2048,
            **published("qwen3_vl_moe_text", 2048, 48, 32, 4, 6144, 151936, moe_intermediate_size=768, **EXPERTS),
        ),
        31_070_754_032,
    ),
}
"""Name -> (config.json, parameters as the model's card or its weight files count them)."""

UNPLANNED = TrainEngineSpec(
    about="An engine without a plan.",
    make="hpcrl.engines.train.fake_trainer.engine:make",
    computes=frozenset({"entropy"}),
)
