"""Tiny models of every causal language model of transformers, made from the defaults of its config class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_blocks"),
    *("num_decoder_layers", "num_encoder_layers", "depth"),
)
FEW: dict[str, int] = {"first_k_dense_replace": 1, "num_kv_shared_layers": 0, "max_window_layers": 0}
"""Keys that count layers from the first or the last."""
HEAD: dict[str, Any] = {"head_dim": 16}
WINDOWS = ["sliding_attention", "full_attention"] * 16
OF_FAMILY: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "bert": {"is_decoder": True},
    "codegen": {"n_ctx": 2048},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 8, "topk_method": "greedy", "n_group": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "granitemoeshared": {"shared_intermediate_size": 64},
    "hunyuan_v1_dense": HEAD,
    "hunyuan_v1_moe": HEAD | {"num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 30},
    "ministral": HEAD,
    "nemotron": {"num_key_value_heads": 8},
    "phimoe": {"sliding_window": 2048},
    "qwen2_moe": {"use_sliding_window": True},
    "qwen2": {"use_sliding_window": True, "layer_types": WINDOWS},
    "qwen3": {"use_sliding_window": True, "layer_types": WINDOWS},
}
"""What a config class has no useful default for, or what makes a mechanism take part."""
GAIN = {"hrm_text": 0.5}
"""Of matrices, where recursion would make much of rounding; 1.5 elsewhere."""
UNMADE = {
    "blt": "sizes of its parts depend on each other",
    "cohere_compass_text": "its class has no default of a key",
    "cpmant": "its prompts are part of its vocabulary",
    "dbrx": "its sections are not read from what they write",
    "gemma3n": "its vision tower needs timm",
    "gemma4_assistant": "no model of its own",
    "gemma4_unified_assistant": "no model of its own",
    "moshi": "its text has a token more than it predicts",
    "musicgen": "no model of text",
    "musicgen_melody": "no model of text",
    "qwen4_exp": "its class has no default of a key",
    "qwen4_exp_text": "its class has no default of a key",
    "reformer": "rows of fixed lengths",
    "zamba": "its two layers share no weights",
    "zamba2": "sizes of its parts depend on each other",
}
"""Families of which no tiny model is made here, and why."""


def tiny_config(family: str, **changes: Any) -> Any:
    """The config of two to four layers, one of each kind."""
    from transformers import CONFIG_MAPPING

    from hpcrl.engines.train.fsdp2.small_model import small_config

    own = OF_FAMILY.get(family, {})
    full = CONFIG_MAPPING[family](**{k: v for k, v in own.items() if k != "layer_types"}).to_dict()
    return small_config(CONFIG_MAPPING[family].from_dict(_fewer_layers(full | own) | changes))


def _fewer_layers(config: dict[str, Any]) -> dict[str, Any]:
    number = next((config[name] for name in LAYERS if isinstance(config.get(name), int)), 0)
    lists = {
        name: value
        for name, value in config.items()
        if isinstance(value, list | tuple) and len(value) == number and number > 4
    }
    kinds = [tuple(str(value[layer]) for value in lists.values()) for layer in range(number)]
    chosen = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())[:4]
    while len(chosen) < 2 <= number:
        chosen.append(chosen[-1] + 1)
    few: dict[str, Any] = {name: len(chosen) for name in LAYERS if isinstance(config.get(name), int)}
    if by_layer := config.get("per_layer_config"):
        few["per_layer_config"] = {str(i): by_layer[k] for i, n in enumerate(chosen) for k in by_layer if int(k) == n}
    few |= {name: min(config[name], FEW[name]) for name in FEW if isinstance(config.get(name), int)}
    shown = {name: [value[layer] for layer in chosen] for name, value in lists.items()}
    nested = {
        name: _fewer_layers(value)
        for name, value in config.items()
        if isinstance(value, dict) and "model_type" in value
    }
    return config | few | shown | nested


def make_folder(family: str, folder: Path, **changes: Any) -> Path:
    """In HF layout, with weights large enough for every part to matter."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and tensor.ndim >= 2 and tensor.requires_grad:
                tensor.normal_(std=GAIN.get(family, 1.5) / tensor.shape[-1] ** 0.5)
            elif name.endswith("e_score_correction_bias"):  # new ones are zero
                tensor.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder
