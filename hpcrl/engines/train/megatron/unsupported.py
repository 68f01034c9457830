"""Why the Megatron engine does not train a model, from its config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.models.families import MEGATRON, family_of, read_shape
from hpcrl.models.quantisation import quantised
from hpcrl.models.rope import rope_type, rope_types, ropes
from hpcrl.models.router import unsupported_choices
from hpcrl.models.shape import CannotPlanError
from hpcrl.models.windows import FULL, SLIDING, attention_kinds

SILU = ("silu", "swish")
"""Names of the only activation that Megatron-Core's layers have here."""


def lacking(own: object, model: Mapping[str, Any]) -> Iterator[str]:
    """See TrainEngineSpec.unsupported; does not depend on the engine's keys."""
    family = family_of(model.get("model_type")).megatron
    if family is None:
        yield f"trains {', '.join(MEGATRON)}, not {model.get('model_type')}"
        return
    yield from quantised(model)
    yield from (f"has no {key}=true" for key in family.biases if model.get(key))
    if (activation := model.get("hidden_act") or "silu") not in SILU:
        yield f"has no hidden_act={activation}, only silu"
    for kind in sorted(rope_types(model).difference(family.rope_types)):
        yield f"has no rope_type={kind}, only {', '.join(family.rope_types)}"
    yield from _partly_rotated(model)
    yield from family.lacks(model)
    if others := attention_kinds(model) - {FULL, SLIDING}:
        yield f"has no layers with {', '.join(sorted(others))}"
    try:
        shape = read_shape(model)
    except CannotPlanError:  # reported where the model is planned
        return
    if shape.num_experts:
        yield from unsupported_choices(
            family_of(model.get("model_type")).router(model), shape.num_experts, shape.experts_per_token
        )


def _partly_rotated(model: Mapping[str, Any]) -> Iterator[str]:
    """A part of a head for which transformers computes frequencies, in families whose code rotates whole heads."""
    family = family_of(model.get("model_type"))
    decoder = family.decoder or family.unlisted
    for rope in ropes(model):
        part = rope.get("partial_rotary_factor", model.get("partial_rotary_factor")) or 1.0
        if part != 1.0 and rope_type(rope) != "default" and not (decoder and decoder.partly_rotated):
            yield f"has no partial_rotary_factor={part} in {model.get('model_type')}"
