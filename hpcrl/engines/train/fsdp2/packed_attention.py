"""Block-diagonal causal attention over packed sequences, registered with transformers under `PACKED_ATTENTION`.

A micro-batch's hidden states are one row of tokens, and a mask over all pairs of tokens would be quadratic in their
number. Instead, a kernel for sequences of different lengths (hpcrl.engines.varlen) reads them in place, or sequences
of similar length are gathered into padded blocks [rows, length] for causal attention without a mask. Padding is on the
right, where no real token attends to it.

Sequences with a common prefix (the prompt of group members) share the prefix's hidden states: it is packed once, and
shown in each sequence (Prefix Grouper, arXiv 2506.05433). The gradient does not change, because a token's hidden states
depend only on the tokens up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from hpcrl.engines import varlen
from hpcrl.engines.blocked_attention import causal_attention, masked_attention
from hpcrl.engines.train.fsdp2.exchange import TokenRanks, heads_to_tokens, tokens_to_heads
from hpcrl.rollout.device_copies import to_device

PACKED_ATTENTION = "hpcrl_packed"
MAX_PADDING = 1 / 8  # maximum share of padding in a row of a block
MIN_PADDING_TOKENS = 8  # always allowed, since blocks of short rows cost less than many kernel calls


def shared_prefixes(token_ids: Tensor, lengths: Sequence[int], prefixes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(kept int64 [K], places int64 [T]): the tokens to pack, and for each of the T tokens its index among them.
    Sequences whose first prefixes[row] tokens are equal share these; all other tokens are kept."""
    ids = token_ids.numpy()
    places = np.empty(len(ids), dtype=np.int64)
    first: dict[bytes, int] = {}  # prefix -> index of its first token
    kept: list[np.ndarray] = []
    start = count = 0
    for length, prefix in zip(lengths, prefixes, strict=True):
        place = first.setdefault(ids[start : start + prefix].tobytes(), count)
        skipped = prefix if place < count else 0
        places[start : start + skipped] = np.arange(place, place + skipped)
        places[start + skipped : start + length] = np.arange(count, count + length - skipped)
        kept.append(np.arange(start + skipped, start + length))
        start, count = start + length, count + length - skipped
    return torch.from_numpy(np.concatenate(kept)), torch.from_numpy(places)


class Shown:
    """Which packed token each slot (a position in attention's rows) shows.

    Attributes:
        tokens: int64 [S], the packed token of each slot.
        first: int64 [K], the first slot of each packed token.
        slots: int64, all slots except padding, sorted by their packed token.
        bags: int64 [K], the index in `slots` of the first slot of each packed token.
    """

    def __init__(self, tokens: Tensor, real: Tensor, device: torch.device):
        """`real`, bool [S], is False for padding."""
        slots = real.nonzero()[:, 0]
        shown = tokens[slots]
        slots = slots[shown.argsort(stable=True)]
        counts = shown.bincount()
        bags = counts.cumsum(0) - counts
        given = (tokens, slots[bags], slots, bags)
        self.tokens, self.first, self.slots, self.bags = (to_device(tensor, device) for tensor in given)


class PackedLayout:
    """Which tokens of some sequences are packed, and their positions in attention's rows. Made once per micro-batch.

    Tokens are split over `ranks`. The first token is repeated until their number divides; no result depends on it.

    Attributes:
        kept: int64 [k], this rank's tokens, in the order of its forward pass; `on_host`: the same on the host.
        rotated: int64, the tokens whose queries and keys this rank computes.
        attention: The preferred kernel (hpcrl.engines.varlen).
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        shared: tuple[Tensor, Tensor] | None = None,
        attention: varlen.Choice = "auto",
        ranks: TokenRanks | None = None,
        images: Tensor | None = None,
        only_in_windows: bool = False,
    ):
        """`shared` comes from shared_prefixes(); without it, every token is packed separately.

        Args:
            images: int64 [T] on the host, a number for each token of an image, equal for tokens that attend to each
                other in both directions, and -1 for other tokens. None if all tokens attend to earlier ones only.
            only_in_windows: Whether they do so only in layers with a sliding window.
        """
        kept, self._places = shared or (torch.arange(sum(lengths)),) * 2
        self._lengths, self._device, self._shares = lengths, device, len(kept) < len(self._places)
        self.attention: varlen.Choice = attention
        self._slots: tuple[list[Tensor], list[Tensor]] = ([], [])  # per block of `padded`: tokens, and which are real
        self._only_in_windows = only_in_windows
        self._images = None if images is None or bool((images < 0).all()) else images
        self.ranks = ranks or TokenRanks()
        self.num_packed, size = len(kept), self.ranks.all.size
        padded = torch.cat([kept, kept[:1].expand(-len(kept) % size)])
        self.on_host = padded[self.ranks.place :: size]
        self.kept = to_device(self.on_host, device)
        self.rotated = to_device(padded[self.ranks.context.rank :: self.ranks.context.size], device)
        self.places = to_device(self._places, device)

    def own(self, tokens: Tensor) -> tuple[Tensor | None, Tensor]:
        """For these tokens, int64 [N]: which of them this rank has (None means all), and their indices in `kept`; both
        int64 [n]."""
        places, size = self.places[tokens], self.ranks.all.size
        if size == 1:
            return None, places
        mine = (places % size == self.ranks.place).nonzero()[:, 0]
        return mine, places[mine] // size

    @property
    def sequences(self) -> Sequence[Tensor]:
        """For each sequence int64 on the host: its tokens' indices among all packed tokens."""
        return self._places.split(list(self._lengths))

    def attends_both_ways(self, window: int | None) -> bool:
        """Whether some tokens attend to later ones, in a layer with this window."""
        return self._images is not None and (window is not None or not self._only_in_windows)

    @cached_property
    def images(self) -> list[Tensor | None]:
        """Per block of `padded`, int64 [rows, length]: the number of each token's image, -1 for other tokens and for
        padding; None for a block without images."""
        if self._images is None:
            return [None] * len(self.padded[0])
        found: list[Tensor | None] = []
        for (rows, length), tokens, real in zip(self.padded[0], *self._slots, strict=True):
            numbers = self._images[tokens].where(real, -1).view(rows, length)
            found.append(to_device(numbers, self._device) if bool((numbers >= 0).any()) else None)
        return found

    @cached_property
    def padded(self) -> tuple[list[tuple[int, int]], Shown]:
        """(rows, length) of blocks of sequences with similar lengths, longest first; and the tokens of all rows,
        concatenated, where padding repeats a row's last token."""
        blocks, tokens, real = self._in_blocks(MAX_PADDING)
        self._slots = tokens, real
        return blocks, self._shown(tokens, real)

    def in_one_block(self) -> tuple[list[tuple[int, int]], Shown]:
        """As `padded`, with any amount of padding."""
        blocks, tokens, real = self._in_blocks(1.0)
        return blocks, self._shown(tokens, real)

    def _shown(self, tokens: list[Tensor], real: list[Tensor]) -> Shown:
        return Shown(self._places[torch.cat(tokens)], torch.cat(real), self._device)

    def _in_blocks(self, max_padding: float) -> tuple[list[tuple[int, int]], list[Tensor], list[Tensor]]:
        """(rows, length) of blocks; and for each, its tokens and which of them are real."""
        lengths, starts = self._lengths, [0]
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        for length in lengths:
            starts.append(starts[-1] + length)
        groups: list[list[int]] = []
        for row in order:
            longest = lengths[groups[-1][0]] if groups else 0
            if longest - lengths[row] > max(MIN_PADDING_TOKENS, int(longest * max_padding)) or not groups:
                groups.append([])
            groups[-1].append(row)
        blocks = [(len(rows), lengths[rows[0]]) for rows in groups]
        slots, real = [], []
        for rows, (_, longest) in zip(groups, blocks, strict=True):
            first = torch.tensor([starts[row] for row in rows])[:, None]
            last = torch.tensor([lengths[row] - 1 for row in rows])[:, None]
            offsets = torch.arange(longest)[None]
            slots.append((first + torch.minimum(offsets, last)).flatten())
            real.append((offsets <= last).flatten())
        return blocks, slots, real

    @cached_property
    def exact(self) -> tuple[Tensor, int, Shown | None]:
        """The sequences' starts (int32 [N + 1]), the longest length, and the tokens of all sequences, concatenated, or
        None instead of the tokens if no prefix is shared."""
        starts = varlen.starts_of(self._lengths, self._device)
        everything = torch.ones(len(self._places), dtype=torch.bool)
        shown = Shown(self._places, everything, self._device) if self._shares else None
        return starts, max(self._lengths), shown


class _Pad(torch.autograd.Function):
    """Packed [K, H, D] -> padded slots. A token's gradient is the sum over the slots that show it. Padding has no
    gradient, because no real query attends to padded keys and padded queries are dropped."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, shown: Shown) -> Tensor:
        ctx.shown = shown
        return packed.index_select(0, shown.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shown = ctx.shown
        if len(shown.slots) == len(shown.bags):  # no token is shared
            return grad.index_select(0, shown.first), None
        # A sum over bags of rows is several times faster than autograd's scatter-add, and deterministic.
        summed = F.embedding_bag(shown.slots, grad.flatten(1), shown.bags, mode="sum")
        return summed.unflatten(1, grad.shape[1:]), None


class _Unpad(torch.autograd.Function):
    """Padded slots -> packed [K, H, D], each token from its first slot; other slots have no gradient."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, shown: Shown) -> Tensor:
        ctx.shown, ctx.shape = shown, padded.shape
        return padded.index_select(0, shown.first)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.shown.first, grad), None


def pad(packed: Tensor, shown: Shown) -> Tensor:
    """Packed [K, ...] -> slots [S, ...]."""
    slots: Tensor = _Pad.apply(packed, shown)
    return slots


def unpad(slots: Tensor, shown: Shown) -> Tensor:
    """Slots [S, ...] -> packed [K, ...]."""
    packed: Tensor = _Unpad.apply(slots, shown)
    return packed


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
    """transformers' attention interface: q [1, H, T, D], k and v [1, KV, T, D] -> ([1, T, H, D], None). A model that
    does not pass `packed_layout` on attends over the whole row, which the probe at load detects."""
    layout = packed_layout or PackedLayout([query.shape[2]], query.device)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scaling = scaling or query.shape[-1] ** -0.5
    context, num_tokens = layout.ranks.context, len(q)
    if context.size > 1:
        repeats = max(1, context.size // k.shape[1])  # with fewer key heads than ranks, heads are repeated
        k, v = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (k, v))
        q, k, v = (tokens_to_heads(x, context) for x in (q, k, v))
        num_tokens = len(q)
    q, k, v = (x[: layout.num_packed] for x in (q, k, v))
    out = _attend(q, k, v, layout, scaling, sliding_window, softcap)
    if num_tokens > layout.num_packed:
        out = F.pad(out, (0, 0, 0, 0, 0, num_tokens - layout.num_packed))
    return (heads_to_tokens(out, context) if context.size > 1 else out).unsqueeze(0), None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attention over all packed tokens: q [K, H, D], k and v [K, KV, D] -> [K, H, D]."""
    sizes = varlen.Setting(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[-1], window, softcap)
    fits = v.shape[-1] == q.shape[-1] and not layout.attends_both_ways(window)
    attend = varlen.find(layout.attention, sizes) if fits else None
    if attend is None:
        return by_blocks((q, k, v), layout, scale, window, softcap)
    starts, longest, shown = layout.exact
    if shown is not None:
        q, k, v = (_Pad.apply(x, shown) for x in (q, k, v))
    out: Tensor = attend(q, k, v, varlen.Spans(starts, longest, scale, window, softcap))
    return out if shown is None else _Unpad.apply(out, shown)


def by_blocks(
    qkv: Sequence[Tensor], layout: PackedLayout, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """[K, H, D]: attention in padded blocks; q [K, H, D], k and v [K, KV, D]."""
    blocks, shown = layout.padded
    q, k, v = (_Pad.apply(x, shown) for x in qkv)
    outputs = []
    # split, not slices: a split's gradient is one concatenation, but n slices' is n full-size tensors of zeros.
    sizes = [rows * length for rows, length in blocks]
    pieces = zip(blocks, layout.images, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
    for (rows, length), images, *parts in pieces:
        qb, kb, vb = (x.unflatten(0, (rows, length)).transpose(1, 2) for x in parts)
        if images is None or not layout.attends_both_ways(window):
            out = causal_attention(qb, kb, vb, scale=scale, window=window, softcap=softcap)
        else:
            out = masked_attention(qb, kb, vb, visible_keys(images, window), scale, softcap)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    unpadded: Tensor = _Unpad.apply(outputs[0] if len(outputs) == 1 else torch.cat(outputs), shown)
    return unpadded


def visible_keys(images: Tensor, window: int | None) -> Tensor:
    """bool [rows, 1, length, length]: the keys that each query sees, earlier ones and all of its image. A window limits
    both.

    Args:
        images: int64 [rows, length], as in PackedLayout.
    """
    length = images.shape[1]
    everything = torch.ones(length, length, dtype=torch.bool, device=images.device)
    same = (images[:, :, None] == images[:, None]) & (images[:, :, None] >= 0)
    seen = everything.tril() | same
    return (seen if window is None else seen & everything.triu(1 - window))[:, None]


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
