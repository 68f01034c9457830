"""The architecture of a model for the native generator, read from an HF folder; unsupported features are refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama")


@dataclass(frozen=True)
class Architecture:
    """A decoder of pre-norm blocks with grouped-query rotary attention and a gated (or mixture of experts) MLP."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    tied: bool  # the vocabulary projection is the embedding
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    expert_layers: frozenset[int]
    num_experts: int
    experts_per_token: int
    expert_size: int
    normalize_experts: bool
    rope_frequencies: tuple[float, ...]  # radians per position, [head_dim / 2]
    max_positions: int
    eos_ids: tuple[int, ...]

    @property
    def num_qk_heads(self) -> int:
        return self.num_heads + self.num_kv_heads

    @property
    def num_qkv_heads(self) -> int:
        return self.num_heads + 2 * self.num_kv_heads

    def rotations(self, num_positions: int, device: torch.device) -> Tensor:
        """complex64 [num_positions, head_dim / 2]: the factor of each position for pairs of dimensions."""
        angles = torch.outer(torch.arange(num_positions).float(), torch.tensor(self.rope_frequencies))
        return torch.polar(torch.ones_like(angles), angles).to(device)


def read_architecture(path: Path) -> Architecture:
    """Architecture of the HF folder `path`. ValueError if there is no config.json, the family is not one of FAMILIES or
    the config needs a feature that is not implemented (sliding windows, rope scaling other than llama3, quantisation,
    activations other than silu)."""
    if not (path / "config.json").is_file():
        raise ValueError(f"model folder {path} has no config.json")
    model_type = json.loads((path / "config.json").read_text()).get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} in {path}/config.json: the native generator runs {FAMILIES}")
    from transformers import AutoConfig  # takes a second; fills in the defaults of every family

    config = AutoConfig.from_pretrained(path)
    for problem in _unsupported(config):
        raise ValueError(
            f"{path}/config.json: {problem} is not implemented by the native generator; use another engine"
        )
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    moe = model_type == "qwen3_moe"
    bias = getattr(config, "attention_bias", False)
    return Architecture(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qkv_bias=bias or model_type == "qwen2",
        out_bias=bias,
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        expert_layers=_expert_layers(config) if moe else frozenset(),
        num_experts=config.num_experts if moe else 0,
        experts_per_token=config.num_experts_per_tok if moe else 0,
        expert_size=config.moe_intermediate_size if moe else 0,
        normalize_experts=config.norm_topk_prob if moe else False,
        rope_frequencies=tuple(_rope_frequencies(config.rope_parameters, head_dim).tolist()),
        max_positions=config.max_position_embeddings,
        eos_ids=_eos_ids(path, config),
    )


def _unsupported(config: Any) -> list[str]:
    """The features of a config that a plain forward pass would silently compute wrongly."""
    rope = config.rope_parameters
    sliding = (
        "sliding_attention" in (getattr(config, "layer_types", None) or ())
        or getattr(config, "sliding_window", None) is not None
    )
    checks = {
        f"a sliding window of {getattr(config, 'sliding_window', None)}": sliding,
        f"rope type {rope.get('rope_type')!r}": rope.get("rope_type", "default") not in ("default", "llama3"),
        f"partial_rotary_factor {rope.get('partial_rotary_factor')}": rope.get("partial_rotary_factor", 1.0) != 1.0,
        f"hidden_act {config.hidden_act!r}": config.hidden_act != "silu",
        "mlp_bias": getattr(config, "mlp_bias", False),
        "quantization_config": getattr(config, "quantization_config", None) is not None,
    }
    return [name for name, present in checks.items() if present]


def _expert_layers(config: Any) -> frozenset[int]:
    return frozenset(
        i
        for i in range(config.num_hidden_layers)
        if i not in config.mlp_only_layers and config.num_experts > 0 and (i + 1) % config.decoder_sparse_step == 0
    )


def _rope_frequencies(rope: dict[str, Any], head_dim: int) -> Tensor:
    """float32 [head_dim / 2] (arXiv 2104.09864); llama3: long waves slowed down by `factor`, blended in between."""
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim))
    if rope.get("rope_type") != "llama3":
        return frequencies
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / rope["factor"])


def _eos_ids(path: Path, config: Any) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json, else of config.json."""
    file = path / "generation_config.json"
    eos = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    if eos is None:
        eos = config.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
