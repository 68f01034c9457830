"""Block-diagonal causal attention over packed sequences, registered with transformers under `PACKED_ATTENTION`.

The hidden states of a micro-batch are one row of T tokens. A T x T mask costs T^2 for work that is sum(L^2), so here
sequences of similar length are gathered into padded blocks [rows, length], which the causal kernel of
scaled_dot_product_attention handles without a mask: padding stands on the right, where no real token looks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

PACKED_ATTENTION = "hpcrl_packed"
MAX_PADDING = 1 / 8  # a row may leave this share of its block empty,
MIN_PADDING_TOKENS = 8  # or this many tokens: blocks of short rows are cheaper than many kernel calls


class PackedLayout:
    """Where the tokens of packed sequences stand in padded blocks. Made once per micro-batch, used by every layer.

    blocks: (rows, length) of each block, longest first. `to_padded` int64 [sum rows * length] holds for each padded
    slot the packed token it shows (padding repeats the row's last token); `to_packed` int64 [T] is the inverse.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device):
        starts, order = [0], sorted(range(len(lengths)), key=lambda row: -lengths[row])
        for length in lengths:
            starts.append(starts[-1] + length)
        groups: list[list[int]] = []
        for row in order:
            longest = lengths[groups[-1][0]] if groups else 0
            if longest - lengths[row] > max(MIN_PADDING_TOKENS, int(longest * MAX_PADDING)) or not groups:
                groups.append([])
            groups[-1].append(row)
        self.blocks = [(len(rows), lengths[rows[0]]) for rows in groups]
        to_padded = []
        for rows, (_, longest) in zip(groups, self.blocks, strict=True):
            first = torch.tensor([starts[row] for row in rows])[:, None]
            last = torch.tensor([lengths[row] - 1 for row in rows])[:, None]
            to_padded.append((first + torch.minimum(torch.arange(longest)[None], last)).flatten())
        padded = torch.cat(to_padded)
        # Padding repeats the last token on later slots; written backwards, each token's own (first) slot wins.
        to_packed = torch.empty(starts[-1], dtype=torch.int64)
        slots = torch.arange(padded.numel())
        real = torch.ones_like(padded, dtype=torch.bool)
        real[1:] = padded[1:] != padded[:-1]
        to_packed[padded[real]] = slots[real]
        self.to_padded = padded.to(device)
        self.to_packed = to_packed.to(device)


class _Pad(torch.autograd.Function):
    """Packed [T, ...] -> padded slots. Padded keys reach no real query and padded queries are dropped, so their
    gradient is left out; what remains is a gather, where autograd would scatter-add."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout = layout
        return packed.index_select(0, layout.to_padded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.layout.to_packed), None


class _Unpad(torch.autograd.Function):
    """Padded slots -> packed [T, ...]; the gradient of padding is exactly zero."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout, ctx.shape = layout, padded.shape
        return padded.index_select(0, layout.to_packed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.layout.to_packed, grad), None


@functools.lru_cache(maxsize=64)
def _band(length: int, window: int | None, device: torch.device) -> Tensor:
    """bool [length, length]: a query sees itself and what came before, at most `window` tokens."""
    band = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return band if window is None else band.triu(1 - window)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scaling: float, softcap: float) -> Tensor:
    """Attention with scores softcap * tanh(scores / softcap) (Gemma 2, arXiv 2408.00118), which no kernel has."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.tanh(q @ k.transpose(2, 3) * (scaling / softcap)) * softcap
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1, dtype=torch.float32)
    return weights.to(v.dtype) @ v


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    packed_layout: PackedLayout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q [1, H, T, D], k and v [1, KV, T, D] -> ([1, T, H, D], None).

    A model that does not hand `packed_layout` through to here attends over the whole row; the probe at load notices.
    """
    layout = packed_layout or PackedLayout([query.shape[2]], query.device)
    q, k, v = (_Pad.apply(x[0].transpose(0, 1), layout) for x in (query, key, value))
    scaling = scaling or query.shape[-1] ** -0.5
    outputs = []
    # split, not slices: the gradient of a split is one concatenation, that of n slices n full-size tensors of zeros.
    sizes = [rows * length for rows, length in layout.blocks]
    for (rows, length), *qkv in zip(layout.blocks, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        qb, kb, vb = (x.unflatten(0, (rows, length)).transpose(1, 2) for x in qkv)
        window = sliding_window if sliding_window is not None and length > sliding_window else None
        if softcap is not None:
            out = _softcapped(qb, kb, vb, _band(length, window, q.device), scaling, softcap)
        else:
            band = None if window is None else _band(length, window, q.device)
            out = F.scaled_dot_product_attention(
                qb, kb, vb, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _Unpad.apply(padded, layout).unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
