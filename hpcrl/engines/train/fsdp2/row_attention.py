"""Attention modules over packed sequences that packed attention cannot replace: those that choose keys themselves, by
an indexer (arXiv 2512.02556) or by compressed keys, so their mask depends on values, and those that do not use
transformers' attention interface (GPT-J, Falcon).

They run row by row, as recurrent mixers do (hpcrl.engines.train.fsdp2.row_mixers), with transformers' own attention and
a causal mask for each block of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hpcrl.engines.train.fsdp2.packed_attention import Reach


def use_own_attention(module: nn.Module, attention: str) -> None:
    """Let an attention module and its parts use this attention of transformers, whatever the model uses."""
    for part in module.modules():
        if hasattr(part, "config"):
            part.config = ConfigWith(part.config, attention)  # type: ignore[assignment]


class ConfigWith:
    """A transformers config with another attention."""

    def __init__(self, config: Any, attention: str):
        self._config: Any = config._config if isinstance(config, ConfigWith) else config
        self._attn_implementation = attention

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_config"), name)


def causal_mask(block: tuple[int, int], reach: Reach | None, like: Tensor) -> Tensor:
    """What to add to the scores of a block (rows, length): [rows, 1, length, length], of like's dtype."""
    rows, length = block
    visible = torch.ones(length, length, dtype=torch.bool, device=like.device).tril()
    if reach is not None and reach.window is not None:
        visible = visible.triu(1 - reach.window)
    mask = torch.zeros_like(visible, dtype=like.dtype).masked_fill(~visible, torch.finfo(like.dtype).min)
    return mask.expand(rows, 1, -1, -1)
