"""Random models in HF layout, of the families that have a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.engines.tiny import make_tokenizer

LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 12,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2_tied": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False, "head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {"tie_word_embeddings": False, **EXPERTS}),
    "qwen3_moe_mixed": ("qwen3_moe", {"tie_word_embeddings": False, **EXPERTS, "mlp_only_layers": [1]}),
    "llama": ("llama", {"tie_word_embeddings": False, "num_hidden_layers": 4}),
    "mistral": ("mistral", {"tie_word_embeddings": False, "sliding_window": None}),
    "deepseek_v3": ("deepseek_v3", {"tie_word_embeddings": False, **LATENT}),
}


def make_models(folder: Path, *names: str) -> None:
    """The models (default: all) in folders of their names; vocabulary 100, fp32, every number random."""
    for number, name in enumerate(names or MODELS):
        family, changes = MODELS[name]
        settings: dict[str, Any] = {
            "vocab_size": 100,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "initializer_range": 0.2,
        }
        if family not in ("deepseek_v3",):
            settings["head_dim"] = 8
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings | changes))
        with torch.no_grad():
            for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if "correction" in n)]:
                if tensor.dim() == 1:
                    tensor.add_(torch.randn_like(tensor), alpha=0.2)
        model.save_pretrained(folder / name)
        make_tokenizer(259).save(str(folder / name / "tokenizer.json"))
