"""The model families that have a file, by model_type, and their models' shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrl.models import (
    bert,
    deepseek_v3,
    gemma,
    hyperclovax,
    llama,
    llama4,
    mamba2,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_vl,
)
from hpcrl.models.family import Family
from hpcrl.models.grouped import grouped_shape
from hpcrl.models.shape import CannotPlanError, ModelShape

LISTED = (
    *(qwen2.FAMILY, qwen3.FAMILY, qwen3_moe.FAMILY, llama.FAMILY, mistral.FAMILY, mistral.MINISTRAL, phi3.FAMILY),
    *(gemma.GEMMA2, gemma.GEMMA3, qwen2_5_vl.FAMILY, qwen3_vl.FAMILY, qwen3_vl.MOE, deepseek_v3.FAMILY),
    *(bert.FAMILY, hyperclovax.FAMILY, llama4.FAMILY, mamba2.FAMILY, mixtral.FAMILY, qwen2_moe.FAMILY),
)
FAMILIES: dict[str, Family] = {model_type: family for family in LISTED for model_type in family.model_types}
UNKNOWN = Family(model_types=())
"""The family of a model_type without a file."""
PLANNED = tuple(name for name, family in FAMILIES.items() if family.decoder is not None)
NATIVE = tuple(name for name, family in FAMILIES.items() if family.native)
MEGATRON = tuple(name for name, family in FAMILIES.items() if family.megatron is not None)
"""Each a tuple of model_type values: parameters are known; the native generator runs them; Megatron trains them."""


def family_of(model_type: Any) -> Family:
    """The family of a model_type; UNKNOWN if it has no file."""
    return FAMILIES.get(str(model_type), UNKNOWN)


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The model described by a config.json, with the defaults of transformers 5 for missing keys.

    CannotPlanError if its family is not in PLANNED, or a size is missing, too large or not a whole number above 0.
    """
    name = config.get("model_type")
    family = family_of(name)
    if family.decoder is None:
        raise CannotPlanError(f"its parameters are not known for model_type {name!r} ({', '.join(PLANNED)} are)")
    return (family.read or grouped_shape)(str(name), family.decoder, config)


def shape_of(folder: str | None, key: str) -> ModelShape:
    """Sizes and parameters of the model in a folder; `key` is the configuration key of the folder, for messages.
    CannotPlanError if the folder's config.json cannot be read."""
    path = Path(folder or "") / "config.json"
    try:
        return read_shape(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise CannotPlanError(f"{key}: {path} cannot be read: {error}") from error


def known_shape(folder: Path) -> ModelShape | None:
    """Sizes and parameters of the model in a folder; None if they are not known."""
    try:
        return shape_of(str(folder), "model.path")
    except CannotPlanError:
        return None


def has_experts(model_type: str) -> bool:
    """Whether models with this model_type have routed experts; False if the decoder is not known."""
    decoder = family_of(model_type).decoder
    return decoder is not None and decoder.experts
