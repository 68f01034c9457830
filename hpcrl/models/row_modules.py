"""Which modules of a model in transformers compute packed sequences row by row: recurrent mixers, and attention that
packed attention cannot replace (hpcrl.engines.train.fsdp2.row_mixers)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from hpcrl.models.family import Family

if TYPE_CHECKING:
    from torch import nn

PARTS = ("indexer", "compressor")
"""Attributes of attention modules that choose keys; None in layers that do not."""
CHOSEN = "prev_topk_indices"
"""The argument of modules that use an earlier layer's choice."""


def chooses_keys(module: nn.Module) -> bool:
    """Whether this is an attention module that chooses keys."""
    given = inspect.signature(type(module).forward).parameters
    if "attention_mask" not in given or not hasattr(module, "layer_idx"):
        return False
    return CHOSEN in given or any(getattr(module, name, None) is not None for name in PARTS)


def is_row_attention(module: nn.Module, family: Family) -> bool:
    """Whether this module computes attention row by row, with a causal mask."""
    return type(module).__name__ in family.row_attention or chooses_keys(module)


def row_modules(named: Iterable[tuple[str, nn.Module]], family: Family) -> Iterator[tuple[str, nn.Module]]:
    """Of these modules by name, outer ones first: those that have a convolution over tokens, attention that runs row by
    row, and those listed by the family. What is inside of one is not listed."""
    from torch import nn

    found: list[str] = []
    for name, module in named:
        inner = any(name.startswith(f"{outer}.") for outer in found)
        has_convolution = any(isinstance(child, nn.Conv1d) for child in module.children())
        is_listed = type(module).__name__ in family.mixers
        if not inner and (is_listed or has_convolution or is_row_attention(module, family)):
            found.append(name)
            yield name, module
