"""Names and shapes of low-rank adapters (LoRA, arXiv 2106.09685): `NAME.weight` is used as weight + scale * B @ A."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic_core import PydanticCustomError

T = TypeVar("T")

A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes that replace `.weight` in the names of an adapter's matrices [rank, in] and [out, rank]."""
STACKED = "lora"
"""The submodule of a layer's experts with an adapter for each stacked parameter: `experts.NAME` [experts, out, in] has
the matrices `experts.lora.NAME.lora_A.weight` [rank * experts, in] and `lora_B` [out, rank * experts], as in peft."""


def is_adapter(name: str) -> bool:
    """Whether a weight belongs to an adapter."""
    return name.endswith((A, B))


def adapted(name: str) -> str:
    """The name of the matrix, or of the stacked matrices, that an adapter's weight adapts."""
    module = name.removesuffix(A).removesuffix(B)
    owner, inside, parameter = module.rpartition(f".{STACKED}.")
    return f"{owner}.{parameter}" if inside else f"{module}.weight"


def layer_of(name: str) -> str:
    """The name of the layer, or of the stacked parameter, that an adapter's weight adapts; patterns refer to it."""
    return adapted(name).removesuffix(".weight")


def matches(module: str, targets: Sequence[str] | None) -> bool:
    """Whether a linear layer is one of trainer.lora.target_modules."""
    return targets is None or module.rpartition(".")[2] in targets


def regular(pattern: Any) -> Any:
    """A key of trainer.lora.rank_pattern or alpha_pattern; other texts raise an error."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise PydanticCustomError("not_regular", "expected a regular expression ({why})", {"why": str(error)}) from None
    return pattern


def matched(patterns: Mapping[str, T], module: str, default: T) -> T:
    """The value of the first pattern that matches a module's name, or its end from a dot on, as in peft."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def unmatched(key: str, patterns: Iterable[str], modules: Sequence[str]) -> str:
    """The problem of trainer.lora.rank_pattern or alpha_pattern in a model with adapters of these layers; empty if
    there is none."""
    idle = [pattern for pattern in patterns if not any(matched({pattern: True}, name, False) for name in modules)]
    example = f"; their names are as {modules[-1]}" if modules else ""
    return f"trainer.lora.{key}: {', '.join(idle)}: no layer with an adapter is named so{example}" if idle else ""


def unknown(targets: Sequence[str] | None, modules: Sequence[str]) -> str:
    """The problem of trainer.lora.target_modules in a model with these linear layers; empty if there is none."""
    names = list(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    lacking = [target for target in targets or () if target not in names]
    if not lacking and names:
        return ""
    has = f"whose linear layers are {', '.join(names)}" if names else "which has no linear layers that take adapters"
    return f"trainer.lora.target_modules: {', '.join(lacking) or 'null'}: the model has none, {has}"
