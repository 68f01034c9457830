"""The model families of the native generator, and what it lacks of their features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpcrl.spec.rope import rope_type, ropes


@dataclass(frozen=True)
class Family:
    """What the code of a model family does whatever its config.json says."""

    qkv_bias: bool = False
    qk_norm: bool = False
    mixture: bool = False
    gemma: bool = False
    """Norms multiply by weight + 1, in float32, also after attention and after the MLP; embeddings are scaled; the MLP
    is gated by gelu."""
    fused: bool = False
    """One matrix for q, k and v, and one for gate and up."""
    partly_rotated: bool = False
    """It reads partial_rotary_factor."""
    windows: Literal["none", "all", "by layer"] = "none"
    """The layers to which config.json's sliding_window applies; by layer: those that layer_types names."""


FAMILIES = {
    "qwen2": Family(qkv_bias=True, windows="by layer"),
    "qwen3": Family(qk_norm=True, windows="by layer"),
    "qwen3_moe": Family(qk_norm=True, mixture=True, windows="all"),
    "llama": Family(),
    "mistral": Family(windows="all"),
    "ministral": Family(windows="by layer"),
    "phi3": Family(fused=True, partly_rotated=True, windows="all"),
    "gemma2": Family(gemma=True, windows="by layer"),
    "gemma3_text": Family(gemma=True, qk_norm=True, windows="by layer"),
}
"""config.json's model_type -> family."""
FIXED_ROPE = ("linear", "llama3", "yarn", "longrope")
"""Kinds of rotary embedding (rope_type), besides the default, that rotate a position by the same angle in sequences of
any length, longrope up to the model's original length."""


def unsupported(model: Mapping[str, Any], longest: int = 0) -> Iterator[str]:
    """The features in a config.json of one of FAMILIES that the engine would compute wrongly. longest: tokens of the
    longest sequence, as far as it is known."""
    family = FAMILIES[model["model_type"]]
    sections = ropes(model)
    for rope in sections:
        kind = rope_type(rope)
        limit = rope.get("original_max_position_embeddings", model.get("original_max_position_embeddings"))
        if kind not in ("default", *FIXED_ROPE):
            yield f"rope type {kind!r}"
        if kind == "longrope" and isinstance(limit, int) and longest > limit:
            yield f"rope type {kind!r} in sequences of {longest} tokens, beyond the original {limit},"
    factors = [section.get("partial_rotary_factor") for section in (*sections, model)]
    if not family.partly_rotated:
        yield from (f"partial_rotary_factor {factor!r}" for factor in factors if factor not in (None, 1.0))
    kinds = model.get("layer_types")
    if family.windows == "by layer" and isinstance(kinds, list):
        others = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
        yield from (f"a layer of type {kind!r}" for kind in others[:1])
    key, act = ("hidden_activation", "gelu_pytorch_tanh") if family.gemma else ("hidden_act", "silu")
    if (model.get(key) or act) != act:
        yield f"{key} {model[key]!r}"
    for name in ("mlp_bias", "use_bidirectional_attention", "quantization_config"):
        if model.get(name):
            yield name
