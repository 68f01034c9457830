"""The models that the Megatron engine trains, from their config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.spec.rope import rope_types

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral")
"""The values of model_type."""
ROPE_TYPES = ("default", "linear", "llama3")
"""Kinds of rotary embedding whose frequencies do not depend on the sequence, and that scale nothing else."""


def lacking(own: object, model: Mapping[str, Any]) -> Iterator[str]:
    """See TrainEngineSpec.unsupported; the keys of the engine do not matter."""
    family = model.get("model_type")
    if family not in FAMILIES:
        yield f"trains {', '.join(FAMILIES)}, not {family}"
        return
    biases = {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",), "qwen3_moe": ("attention_bias",)}
    yield from (f"has no {key}=true" for key in biases.get(str(family), ()) if model.get(key))
    for kind in sorted(rope_types(model).difference(ROPE_TYPES)):
        yield f"has no rope_type={kind}, only {', '.join(ROPE_TYPES)}"
    if len(kinds := attention_kinds(model)) > 1:
        yield f"has no layers of {len(kinds)} kinds of attention ({', '.join(sorted(kinds))})"


def attention_kinds(model: Mapping[str, Any]) -> set[str]:
    """Of full_attention and sliding_attention, those that layers have, as transformers reads a config.json of one of
    FAMILIES."""
    if isinstance(named := model.get("layer_types"), list):
        return set(map(str, named))
    family, window = model.get("model_type"), model.get("sliding_window", 4096)
    if family == "llama" or window is None or (family != "mistral" and not model.get("use_sliding_window")):
        return {"full_attention"}
    first, layers = model.get("max_window_layers", 28), model.get("num_hidden_layers", 0)
    if family not in ("qwen2", "qwen3") or not isinstance(first, int) or first <= 0:
        return {"sliding_attention"}
    return {"full_attention", *(("sliding_attention",) if isinstance(layers, int) and first < layers else ())}
