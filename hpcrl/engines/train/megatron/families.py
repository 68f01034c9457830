"""The models that the Megatron engine trains, from their config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.spec.rope import rope_type, rope_types, ropes

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "deepseek_v3")
"""The values of model_type."""
ROPE_TYPES = ("default", "linear", "llama3")
"""Kinds of rotary embedding whose frequencies do not depend on the sequence, and that scale nothing else."""
SILU = ("silu", "swish")
"""Names of the one activation that Megatron-Core's layers are given here."""
WITHOUT_WINDOWS = ("llama", "deepseek_v3")
"""Families that read neither sliding_window nor layer_types."""


def lacking(own: object, model: Mapping[str, Any]) -> Iterator[str]:
    """See TrainEngineSpec.unsupported; the keys of the engine do not matter."""
    family = model.get("model_type")
    if family not in FAMILIES:
        yield f"trains {', '.join(FAMILIES)}, not {family}"
        return
    if model.get("quantization_config"):
        yield "has no quantized weights (quantization_config); convert them to bfloat16"
    biases = {"llama": ("attention_bias", "mlp_bias")}
    able = ("attention_bias",) if family in ("qwen3", "qwen3_moe", "deepseek_v3") else ()
    yield from (f"has no {key}=true" for key in biases.get(str(family), able) if model.get(key))
    if (activation := model.get("hidden_act") or "silu") not in SILU:
        yield f"has no hidden_act={activation}, only silu"
    latent = family == "deepseek_v3"
    allowed = ("default", "yarn") if latent else ROPE_TYPES
    for kind in sorted(rope_types(model).difference(allowed)):
        yield f"has no rope_type={kind}, only {', '.join(allowed)}"
    if latent:
        yield from _lacking_of_latent(model)
        return
    if len(kinds := attention_kinds(model)) > 1:
        yield f"has no layers of {len(kinds)} kinds of attention ({', '.join(sorted(kinds))})"


def _lacking_of_latent(model: Mapping[str, Any]) -> Iterator[str]:
    """Where Megatron-Core's layers compute something else than transformers' DeepseekV3."""
    rotated = model.get("qk_rope_head_dim", 64)
    if (width := model.get("head_dim", rotated)) != rotated:
        yield f"rotates the qk_rope_head_dim numbers of a head, {rotated}, not head_dim={width} of them"
    for key in ("rope_interleave", "norm_topk_prob"):
        if not model.get(key, True):
            yield f"has no {key}=false"
    for rope in (rope for rope in ropes(model) if rope_type(rope) == "yarn"):
        both = rope.get("mscale"), rope.get("mscale_all_dim")
        if not both[0] or both[0] != both[1] or rope.get("attention_factor"):
            yield f"has yarn with mscale equal to mscale_all_dim only, not with {both[0]} and {both[1]}"
    groups, chosen = model.get("n_group", 8), model.get("topk_group", 4)
    if groups and groups > 1 and model.get("num_experts_per_tok", 8) // chosen != 2:
        yield (
            f"chooses groups of experts by their best num_experts_per_tok / topk_group, which must be 2, the model has "
            f"{model.get('num_experts_per_tok', 8)} / {chosen}"
        )


def attention_kinds(model: Mapping[str, Any]) -> set[str]:
    """Of full_attention and sliding_attention, those that layers have, as transformers reads a config.json of one of
    FAMILIES."""
    family, window = model.get("model_type"), model.get("sliding_window", 4096)
    if family in WITHOUT_WINDOWS:
        return {"full_attention"}
    if isinstance(named := model.get("layer_types"), list):
        return set(map(str, named))
    if window is None or (family != "mistral" and not model.get("use_sliding_window")):
        return {"full_attention"}
    first, layers = model.get("max_window_layers", 28), model.get("num_hidden_layers", 0)
    if family not in ("qwen2", "qwen3") or not isinstance(first, int) or first <= 0:
        return {"sliding_attention"}
    return {"full_attention", *(("sliding_attention",) if isinstance(layers, int) and first < layers else ())}
