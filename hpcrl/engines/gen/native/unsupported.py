"""Features of config.json that families of the native generator may use but the native generator does not support."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.models.families import family_of, read_shape
from hpcrl.models.rope import rope_type, ropes
from hpcrl.models.router import ExpertRouter
from hpcrl.models.shape import CannotPlanError, decoder_keys

LINEAR = "linear_attention"
"""The type of a layer with a gated delta rule."""

FIXED_ROPE = ("linear", "llama3", "yarn", "longrope")
"""Kinds of rotary embedding (rope_type), in addition to the default, whose frequencies do not depend on the sequence
length; for longrope, only up to the model's original length."""


def _of_experts(model: Mapping[str, Any], router: ExpertRouter) -> Iterator[str]:
    if not 1 <= router.chosen_groups <= router.groups:
        yield f"topk_group={router.chosen_groups} of n_group={router.groups}"
        return
    try:
        shape = read_shape(model)
    except CannotPlanError:  # reported where the model is checked
        return
    most = router.chosen_groups * (shape.num_experts // router.groups)
    if shape.experts_per_token > most:
        yield f"the choice of {shape.experts_per_token} experts in topk_group={router.chosen_groups} groups with {most}"
    if shape.latent is not None and (model.get("head_dim") or shape.latent.rope) != shape.latent.rope:
        yield f"head_dim={model['head_dim']} with qk_rope_head_dim={shape.latent.rope}"


def unsupported(model: Mapping[str, Any], longest: int = 0) -> Iterator[str]:
    """The features that the engine would compute wrongly. `longest` is the maximum sequence length, 0 if not known."""
    family, model = family_of(model["model_type"]), decoder_keys(model)
    decoder = family.decoder or family.unlisted
    assert decoder is not None
    sections = ropes(model)
    for rope in sections:
        kind = rope_type(rope)
        limit = rope.get("original_max_position_embeddings", model.get("original_max_position_embeddings"))
        fixed = kind == "dynamic" and decoder.rope_alpha and rope.get("alpha")
        if kind not in ("default", *FIXED_ROPE) and not fixed:
            yield f"rope type {kind!r}"
        if kind == "longrope" and isinstance(limit, int) and longest > limit:
            yield f"rope type {kind!r} in sequences of {longest} tokens, beyond the original {limit},"
    factors = [section.get("partial_rotary_factor") for section in (*sections, model)]
    if not decoder.partly_rotated:
        yield from (f"partial_rotary_factor {factor!r}" for factor in factors if factor not in (None, 1.0))
    kinds = model.get("layer_types")
    known = ("full_attention", LINEAR if decoder.delta_rule else "sliding_attention")
    if (decoder.windows == "by layer" or decoder.delta_rule) and isinstance(kinds, list):
        others = [kind for kind in kinds if kind not in known]
        yield from (f"a layer of type {kind!r}" for kind in others[:1])
    key, act = ("hidden_activation", "gelu_pytorch_tanh") if decoder.gemma else ("hidden_act", "silu")
    if (model.get(key) or act) != act:
        yield f"{key} {model[key]!r}"
    if decoder.delta_rule and isinstance(kinds, list) and "full_attention" not in kinds:
        yield "a model without attention"
    if decoder.experts:
        yield from _of_experts(model, family.router(model))
    for name in (decoder.mlp_bias_key or "mlp_bias", "use_bidirectional_attention", "quantization_config"):
        if model.get(name):
            yield name
