"""Block-diagonal causal attention over packed sequences, registered with transformers under `PACKED_ATTENTION`.

A micro-batch's hidden states are one row of tokens, and a mask over all pairs of tokens would be quadratic in their
number. Instead, a kernel for sequences of different lengths (hpcrl.engines.varlen) reads them in place, or sequences
of similar length are gathered into padded blocks [rows, length] for causal attention without a mask. Padding is on the
right, where no real token attends to it.

Sequences with a common prefix share the prefix's hidden states (hpcrl.engines.train.fsdp2.prefix_tree): it is packed
once, its queries are computed once, and its keys and values are shown in each sequence.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, masking_utils

from hpcrl.engines import varlen
from hpcrl.engines.blocked_attention import causal_attention, masked_attention, suffix_attention, suffix_mask
from hpcrl.engines.train.fsdp2.exchange import TokenRanks, heads_to_tokens, tokens_to_heads
from hpcrl.engines.train.fsdp2.prefix_tree import Shared
from hpcrl.rollout.device_copies import to_device

PACKED_ATTENTION = "hpcrl_packed"
MAX_PADDING = 1 / 8  # maximum share of padding in a row of a block
MAX_MASKED = 1 << 24  # maximum pairs of queries and keys in masks for common prefixes
MIN_PADDING_TOKENS = 8  # always allowed, since blocks of short rows cost less than many kernel calls


class Reach(NamedTuple):
    """What a layer's mask has besides causality: a token attends to the last `window` tokens, itself included, or to
    those of its chunk of `chunk` tokens of a row."""

    window: int | None = None
    chunk: int | None = None


def reach_of_mask(config: PreTrainedConfig | None = None, local_size: int | None = None, **_: Any) -> Reach | None:
    """transformers' mask interface: what its layers get as attention_mask; None for causality without more."""
    if local_size is None:
        return None
    is_chunk = getattr(config, "sliding_window", None) is None and hasattr(config, "attention_chunk_size")
    return Reach(chunk=local_size) if is_chunk else Reach(window=local_size)


class PositionsAsCache:
    """A cache without keys, for layers that count a token's position from the length of the cache. That of packed
    tokens is a number for each token: its position less its place."""

    def __init__(self, positions: Tensor):
        """positions: int64 [T]."""
        self._offsets = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer: int = 0) -> Tensor:
        """What, added to a token's place among the packed ones, is its position."""
        return self._offsets

    def get_query_offset(self, layer: int = 0) -> int:
        """Part of transformers' caches."""
        return 0

    def get_mask_sizes(self, num_queries: int, layer: int = 0) -> tuple[int, int]:
        """Part of transformers' caches."""
        return num_queries, 0

    def update(self, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Part of transformers' caches."""
        return keys, values


@contextlib.contextmanager
def sequences_are_known() -> Iterator[None]:
    """Context in which transformers' masks do not search positions for packed sequences, which waits for the device:
    packed attention has their layout."""
    own = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = own


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


@dataclass(frozen=True)
class AttentionBlock:
    """Sequences that attention computes together: `indices` of sequences, and numbers of queries and of keys per
    sequence. `first`, int64 [rows], is the position of each sequence's first query; None if all are 0."""

    indices: list[int]
    queries: int
    length: int
    first: Tensor | None
    masks: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return len(self.indices)

    def mask(self, window: int | None, sinks: bool, dtype: torch.dtype) -> Tensor:
        """suffix_mask(), made once for all layers of a kind."""
        assert self.first is not None
        key = (window, sinks, dtype)
        if key not in self.masks:
            self.masks[key] = suffix_mask(self.first, self.queries, self.length, *key)
        return self.masks[key]


@dataclass(frozen=True)
class Padded:
    """Blocks, those with the most queries first, and the tokens of all of their queries and keys, concatenated; padding
    repeats a sequence's last token."""

    blocks: list[AttentionBlock]
    queries: Shown
    keys: Shown


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
        shared: Shared | None = None,
        attention: varlen.Choice = "auto",
        ranks: TokenRanks | None = None,
        images: Tensor | None = None,
        only_in_windows: bool = False,
    ):
        """`shared` comes from share_prefixes(); without it, every token is packed separately.

        Args:
            images: int64 [T] on the host, a number for each token of an image, equal for tokens that attend to each
                other in both directions, and -1 for other tokens. None if all tokens attend to earlier ones only.
            only_in_windows: Whether they do so only in layers with a sliding window.
        """
        kept, self._places, self._skipped = shared or Shared(*(torch.arange(sum(lengths)),) * 2, [0] * len(lengths))
        self._lengths, self._device = lengths, device
        self.shares = any(self._skipped)
        self.attention: varlen.Choice = attention
        self._only_in_windows = only_in_windows
        self._spans: dict[bool, tuple[varlen.Spans, Shown | None, Shown | None]] = {}
        self._chunked: dict[int, PackedLayout] = {}
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

    def in_chunks(self, size: int) -> PackedLayout:
        """The same tokens in shorter sequences: each is divided into chunks of this size."""
        if size not in self._chunked:
            divided = copy.copy(self)
            chunks = [(row, first) for row, n in enumerate(self._lengths) for first in range(0, n, size)]
            divided._lengths = [min(size, self._lengths[row] - first) for row, first in chunks]
            skipped = [max(0, self._skipped[row] - first) for row, first in chunks]
            divided._skipped = [min(some) for some in zip(skipped, divided._lengths, strict=True)]
            divided._spans = {}
            for name in ("images", "padded", "own_queries"):
                vars(divided).pop(name, None)
            self._chunked[size] = divided
        return self._chunked[size]

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
            return [None] * len(self.padded.blocks)
        found: list[Tensor | None] = []
        nothing = [0] * len(self._lengths)
        for block in self.padded.blocks:
            tokens, real = self._slots(block.indices, nothing, block.length)
            numbers = self._images[tokens].where(real, -1).view(block.rows, block.length)
            found.append(to_device(numbers, self._device) if bool((numbers >= 0).any()) else None)
        return found

    @cached_property
    def padded(self) -> Padded:
        """All sequences with all of their tokens."""
        return self._pad([0] * len(self._lengths))

    def in_one_block(self) -> Padded:
        """As `padded`, with any amount of padding."""
        return self._pad([0] * len(self._lengths), max_padding=1.0)

    @cached_property
    def own_queries(self) -> Padded:
        """Each packed token as query once: the sequences without their skipped tokens, whose keys they see. If their
        masks would be too large, as `padded`."""
        sizes = (n * (n - skipped) for n, skipped in zip(self._lengths, self._skipped, strict=True) if skipped)
        return self._pad(self._skipped) if self.shares and sum(sizes) <= MAX_MASKED else self.padded

    def _pad(self, skipped: Sequence[int], max_padding: float = MAX_PADDING) -> Padded:
        """Sequences with similar numbers of tokens and of queries form a block."""
        lengths = self._lengths
        order = [row for row, length in enumerate(lengths) if length > skipped[row]]
        order.sort(key=lambda row: (skipped[row] > 0, skipped[row] - lengths[row], -lengths[row]))
        groups: list[list[int]] = []
        for row in order:
            if not groups or not self._is_like(groups[-1], row, skipped, max_padding):
                groups.append([])
            groups[-1].append(row)
        blocks, parts = [], []
        for rows in groups:
            longest = max(lengths[row] for row in rows)
            queries = max(lengths[row] - skipped[row] for row in rows)
            first = None
            if skipped[rows[0]]:
                first = to_device(torch.tensor([skipped[row] for row in rows]), self._device)
            blocks.append(AttentionBlock(rows, queries, longest, first))
            parts.append((self._slots(rows, skipped, queries), self._slots(rows, [0] * len(lengths), longest)))
        own, every = (
            Shown(self._places[torch.cat(tokens)], torch.cat(real), self._device)
            for tokens, real in (tuple(zip(*part, strict=True)) for part in zip(*parts, strict=True))
        )
        return Padded(blocks, own, every if any(skipped) else own)

    def _is_like(self, rows: Sequence[int], row: int, skipped: Sequence[int], max_padding: float) -> bool:
        """Whether a sequence may be added to a block of these, of which the first has the most queries."""
        if (skipped[row] > 0) != (skipped[rows[0]] > 0):
            return False
        lengths = [self._lengths[other] for other in (*rows, row)]
        queries = [self._lengths[other] - skipped[other] for other in (rows[0], row)]
        return all(max(n) - min(n) <= max(MIN_PADDING_TOKENS, int(max(n) * max_padding)) for n in (lengths, queries))

    def _slots(self, rows: Sequence[int], skipped: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """The tokens of these sequences after the skipped ones, int64 [rows * length], padded with each sequence's last
        token; and which of them are no padding."""
        ends = torch.tensor(self._lengths).cumsum(0)
        last = ends[rows][:, None] - 1
        first = last + 1 - torch.tensor([self._lengths[row] - skipped[row] for row in rows])[:, None]
        tokens = first + torch.arange(length)[None]
        return torch.minimum(tokens, last).flatten(), (tokens <= last).flatten()

    def spans(self, own_queries: bool) -> tuple[varlen.Spans, Shown | None, Shown | None]:
        """Where sequences start and end, and the tokens of all queries and of all keys, None for the packed tokens as
        they are."""
        if own_queries not in self._spans:
            queries = [n - skipped * own_queries for n, skipped in zip(self._lengths, self._skipped, strict=True)]
            starts, key_starts = (varlen.starts_of(some, self._device) for some in (queries, self._lengths))
            everything = torch.ones(len(self._places), dtype=torch.bool)
            every = Shown(self._places, everything, self._device) if self.shares else None
            found = varlen.Spans(starts, max(queries), key_starts, max(self._lengths))
            self._spans[own_queries] = found, None if own_queries else every, every
        return self._spans[own_queries]


class AttentionLayout:
    """The layout of the current forward pass and its recomputation, as an attribute `name` of attention modules. Some
    layers (Nemotron, StableLM) do not pass the argument `packed_layout` on to their attention."""

    name = "hpcrl_attention_layout"

    def __init__(self) -> None:
        self.current: PackedLayout | None = None


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
    attention_mask: Tensor | Reach | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    packed_layout: PackedLayout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q [1, H, T, D], k and v [1, KV, T, D] -> ([1, T, H, D], None). Without a
    layout, it attends over the whole row. `s_aux`, [H], are attention sinks."""
    of_module = getattr(module, AttentionLayout.name, None)
    layout = packed_layout or (of_module and of_module.current) or PackedLayout([query.shape[2]], query.device)
    window, sinks = sliding_window, s_aux
    if isinstance(attention_mask, Tensor):
        raise NotImplementedError("a layer makes its own mask")
    if attention_mask is not None:
        window = attention_mask.window
        layout = layout.in_chunks(attention_mask.chunk) if attention_mask.chunk is not None else layout
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scaling = scaling or query.shape[-1] ** -0.5
    context, num_tokens = layout.ranks.context, len(q)
    if context.size > 1:
        repeats = max(1, context.size // k.shape[1])  # with fewer key heads than ranks, heads are repeated
        k, v = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (k, v))
        q, k, v = (tokens_to_heads(x, context) for x in (q, k, v))
        sinks = sinks if sinks is None else sinks.chunk(context.size)[context.rank]
        num_tokens = len(q)
    q, k, v = (x[: layout.num_packed] for x in (q, k, v))
    out = _attend(q, k, v, layout, scaling, window, softcap, sinks)
    if num_tokens > layout.num_packed:
        out = F.pad(out, (0, 0, 0, 0, 0, num_tokens - layout.num_packed))
    return (heads_to_tokens(out, context) if context.size > 1 else out).unsqueeze(0), None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedLayout,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention over all packed tokens: q [K, H, D], k and v [K, KV, D] -> [K, H, D]."""
    fits = v.shape[-1] == q.shape[-1] and sinks is None and not layout.attends_both_ways(window)
    for own_queries in (True, False) if layout.shares else (False,):
        sizes = varlen.Setting(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[-1], window, softcap, own_queries)
        attend = varlen.find(layout.attention, sizes) if fits else None
        if attend is not None:
            spans, queries, keys = layout.spans(own_queries)
            q, k, v = (x if shown is None else pad(x, shown) for x, shown in ((q, queries), (k, keys), (v, keys)))
            out: Tensor = attend(q, k, v, spans._replace(scale=scale, window=window, softcap=softcap))
            return out if queries is None else unpad(out, queries)
    return by_blocks((q, k, v), layout, scale, window, softcap, sinks)


def by_blocks(
    qkv: Sequence[Tensor],
    layout: PackedLayout,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[K, H, D]: attention in padded blocks; q [K, H, D], k and v [K, KV, D]."""
    both_ways = layout.attends_both_ways(window)
    padded = layout.padded if both_ways else layout.own_queries
    images = layout.images if both_ways else [None] * len(padded.blocks)
    q, k, v = (pad(x, shown) for x, shown in zip(qkv, (padded.queries, padded.keys, padded.keys), strict=True))
    outputs = []
    # split, not slices: a split's gradient is one concatenation, but n slices' is n full-size tensors of zeros.
    keys = [block.rows * block.length for block in padded.blocks]
    parts = (q.split([block.rows * block.queries for block in padded.blocks]), k.split(keys), v.split(keys))
    for block, numbers, *tensors in zip(padded.blocks, images, *parts, strict=True):
        qb, kb, vb = (x.unflatten(0, (block.rows, -1)).transpose(1, 2) for x in tensors)
        if numbers is not None:
            out = masked_attention(qb, kb, vb, visible_keys(numbers, window), scale, softcap, sinks)
        elif block.first is not None:
            mask = block.mask(window, sinks is not None, q.dtype)
            out = suffix_attention(qb, kb, vb, mask, scale=scale, softcap=softcap, sinks=sinks)
        else:
            out = causal_attention(qb, kb, vb, scale=scale, window=window, softcap=softcap, sinks=sinks)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return unpad(outputs[0] if len(outputs) == 1 else torch.cat(outputs), padded.queries)


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
AttentionMaskInterface.register(PACKED_ATTENTION, reach_of_mask)
