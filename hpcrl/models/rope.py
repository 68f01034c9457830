"""Kinds of rotary embedding (rope_type) in a config.json, with the keys of all transformers versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds whose frequencies change above some length: dynamic NTK, and LongRoPE of Phi-3 (arXiv 2402.13753)."""


def ropes(model: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rotary embedding's parameters, one mapping for each kind of layer; an empty mapping means the default."""
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return []
    return [section for section in rope.values() if isinstance(section, Mapping)] or [rope]


def rope_type(rope: Mapping[str, Any]) -> str:
    """The kind of a rotary embedding from ropes(). M-RoPE, as published Qwen-VL models call it, has the default's
    frequencies."""
    if rope.get("long_factor"):
        return "longrope"
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    return "default" if kind == "mrope" else kind


def rope_types(model: Mapping[str, Any]) -> set[str]:
    """The kinds of rotary embedding in all layers."""
    return {rope_type(rope) for rope in ropes(model)} or {"default"}
