"""Names and shapes of low-rank adapters (LoRA, arXiv 2106.09685): `NAME.weight` is used as weight + scale * B @ A."""

from __future__ import annotations

from collections.abc import Sequence

A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes that replace `.weight` in the names of an adapter's matrices [rank, in] and [out, rank]."""


def is_adapter(name: str) -> bool:
    """Whether a weight belongs to an adapter."""
    return name.endswith((A, B))


def adapted(name: str) -> str:
    """The name of the matrix that an adapter's weight adapts."""
    return f"{name.removesuffix(A).removesuffix(B)}.weight"


def matches(module: str, targets: Sequence[str] | None) -> bool:
    """Whether a linear layer is one of trainer.lora.target_modules."""
    return targets is None or module.rpartition(".")[2] in targets


def unknown(targets: Sequence[str] | None, modules: Sequence[str]) -> str:
    """The problem of trainer.lora.target_modules in a model with these linear layers; empty if there is none."""
    names = list(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    lacking = [target for target in targets or () if target not in names]
    if not lacking and names:
        return ""
    has = f"whose linear layers are {', '.join(names)}" if names else "which has no linear layers that take adapters"
    return f"trainer.lora.target_modules: {', '.join(lacking) or 'null'}: the model has none, {has}"
