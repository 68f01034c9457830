"""Kinds of rotary embedding (rope_type) in a config.json, with the keys of all transformers versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.models.shape import decoder_keys

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds whose frequencies change above some length: dynamic NTK, and LongRoPE of Phi-3 (arXiv 2402.13753)."""


def ropes(model: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rotary embedding's parameters, one mapping for each kind of layer; an empty mapping means the default."""
    model = decoder_keys(model)
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return []
    return [section for section in rope.values() if isinstance(section, Mapping)] or [rope]


def rope_type(rope: Mapping[str, Any]) -> str:
    """The kind of a rotary embedding from ropes(). Early files name the default with several axes mrope."""
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    return "longrope" if rope.get("long_factor") else "default" if kind == "mrope" else kind


def rope_types(model: Mapping[str, Any]) -> set[str]:
    """The kinds of rotary embedding in all layers."""
    return {rope_type(rope) for rope in ropes(model)} or {"default"}
