"""Block-diagonal causal attention over packed sequences, registered with transformers under `PACKED_ATTENTION`.

A micro-batch's hidden states are one row of tokens, and a mask over all pairs of tokens would be quadratic in their
number. Instead, a kernel for sequences of different lengths (hpcrl.engines.varlen) reads them in place, or sequences
of similar length are gathered into padded blocks [rows, length] for causal attention without a mask. Padding is on the
right, where no real token attends to it.

Sequences with a common prefix share the prefix's hidden states (hpcrl.engines.train.fsdp2.prefix_tree): it is packed
once, its queries are computed once, and its keys and values are shown in each sequence.

Where tokens of an image attend to each other in both directions, their queries are computed again, each packed image
once: they see all keys of their sequence up to the image's end.
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
from hpcrl.engines.blocked_attention import causal_attention, full_attention, suffix_attention, suffix_mask
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
        packed: int64 [k], the packed tokens that have a slot; None if all K have one.
        first: int64 [k], the first slot of each of these.
        slots: int64, all slots except padding, sorted by their packed token.
        bags: int64 [K], the index in `slots` of the first slot of each packed token.
        once: Whether every packed token has one slot.
    """

    def __init__(self, tokens: Tensor, real: Tensor, count: int, device: torch.device):
        """`real`, bool [S], is False for padding; `count` is K."""
        slots = real.nonzero()[:, 0]
        shown = tokens[slots]
        slots = slots[shown.argsort(stable=True)]
        counts = shown.bincount(minlength=count)
        bags = counts.cumsum(0) - counts
        packed = counts.nonzero()[:, 0]
        self.once = len(slots) == len(packed) == count
        given = (tokens, packed, slots[bags[packed]], slots, bags)
        self.tokens, found, self.first, self.slots, self.bags = (to_device(tensor, device) for tensor in given)
        self.packed = None if len(packed) == count else found


@dataclass(frozen=True)
class AttentionBlock:
    """Sequences that attention computes together: `indices` of sequences, and numbers of queries and of keys per
    sequence.

    Args:
        first: int64 [rows], the position of each sequence's first query among its keys; None if all are 0.
        ends: int64 [rows], the number of keys of each image, all of which its queries see; None for causal attention.
        full: Whether all of the images have `length` keys.
    """

    indices: list[int]
    queries: int
    length: int
    first: Tensor | None
    ends: Tensor | None = None
    full: bool = False
    masks: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return len(self.indices)

    def hides_nothing(self, window: int | None) -> bool:
        """Whether every query sees every key."""
        return self.full and (window is None or window >= self.length)

    def mask(self, window: int | None, sinks: bool, dtype: torch.dtype) -> Tensor:
        """suffix_mask(), made once for all layers of a kind."""
        assert self.first is not None
        key = (window, sinks, dtype)
        if key not in self.masks:
            self.masks[key] = suffix_mask(self.first, self.queries, self.length, *key, ends=self.ends)
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
        self._both_ways: dict[int | None, Padded] = {}
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
            divided._spans, divided._both_ways = {}, {}
            for name in ("padded", "own_queries"):
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

    def images(self, window: int | None) -> Padded:
        """The packed images, each one once: its queries, and the keys of its sequence up to its end, less those before
        the first query's window."""
        if window not in self._both_ways:
            self._both_ways[window] = self._pad_images(window)
        return self._both_ways[window]

    def _pad_images(self, window: int | None) -> Padded:
        """Images with similar numbers of queries and of keys form a block. Of a prefix that sequences share, the first
        one has the images."""
        assert self._images is not None
        found = []  # (queries, keys, index of the end among all tokens)
        start = 0
        for length, skipped in zip(self._lengths, self._skipped, strict=True):
            numbers, counts = self._images[start : start + length].unique_consecutive(return_counts=True)
            place = 0
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                if number >= 0 and place >= skipped:
                    first = 0 if window is None else max(0, place + 1 - window)
                    found.append((count, place + count - first, start + place + count))
                place += count
            start += length
        found.sort(reverse=True)
        groups: list[list[tuple[int, int, int]]] = []
        for image in found:
            if not groups or any(_differ(*pair) for pair in zip(groups[-1][0][:2], image[:2], strict=True)):
                groups.append([])
            groups[-1].append(image)
        blocks, parts = [], []
        for group in groups:
            queries, keys, ends = torch.tensor(group).t()
            most, longest = int(queries.max()), int(keys.max())
            firsts, sizes = (to_device(some, self._device) for some in (keys - queries, keys))
            full = bool((keys == longest).all())
            blocks.append(AttentionBlock([*range(len(group))], most, longest, firsts, sizes, full))
            parts.append((_slots(ends, queries, most), _slots(ends, keys, longest)))
        return self._shown(blocks, parts)

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
            ends, keys = torch.tensor(lengths).cumsum(0)[rows], torch.tensor(lengths)[rows]
            parts.append((_slots(ends, keys - torch.tensor(skipped)[rows], queries), _slots(ends, keys, longest)))
        return self._shown(blocks, parts)

    def _shown(self, blocks: list[AttentionBlock], parts: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> Padded:
        """Blocks with the tokens of their queries and of their keys."""
        own, every = (
            Shown(self._places[torch.cat(tokens)], torch.cat(real), self.num_packed, self._device)
            for tokens, real in (tuple(zip(*part, strict=True)) for part in zip(*parts, strict=True))
        )
        return Padded(blocks, own, every if any(block.first is not None for block in blocks) else own)

    def _is_like(self, rows: Sequence[int], row: int, skipped: Sequence[int], max_padding: float) -> bool:
        """Whether a sequence may be added to a block of these, of which the first has the most queries."""
        if (skipped[row] > 0) != (skipped[rows[0]] > 0):
            return False
        lengths = [self._lengths[other] for other in (*rows, row)]
        queries = [self._lengths[other] - skipped[other] for other in (rows[0], row)]
        return not any(_differ(max(n), min(n), max_padding) for n in (lengths, queries))

    def spans(self, own_queries: bool) -> tuple[varlen.Spans, Shown | None, Shown | None]:
        """Where sequences start and end, and the tokens of all queries and of all keys, None for the packed tokens as
        they are."""
        if own_queries not in self._spans:
            queries = [n - skipped * own_queries for n, skipped in zip(self._lengths, self._skipped, strict=True)]
            starts, key_starts = (varlen.starts_of(some, self._device) for some in (queries, self._lengths))
            everything = torch.ones(len(self._places), dtype=torch.bool)
            every = Shown(self._places, everything, self.num_packed, self._device) if self.shares else None
            found = varlen.Spans(starts, max(queries), key_starts, max(self._lengths))
            self._spans[own_queries] = found, None if own_queries else every, every
        return self._spans[own_queries]


def _differ(most: int, fewest: int, max_padding: float = MAX_PADDING) -> bool:
    """Whether rows of these numbers of tokens need too much padding to form a block."""
    return abs(most - fewest) > max(MIN_PADDING_TOKENS, int(max(most, fewest) * max_padding))


def _slots(ends: Tensor, counts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """For each row the `counts` tokens before its end, int64 [rows * length], padded with the last one; and which of
    them are no padding."""
    tokens = (ends - counts)[:, None] + torch.arange(length)
    return torch.minimum(tokens, ends[:, None] - 1).flatten(), (tokens < ends[:, None]).flatten()


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
        if shown.once:
            return grad.index_select(0, shown.first), None
        # A sum over bags of rows is several times faster than autograd's scatter-add, and deterministic.
        summed = F.embedding_bag(shown.slots, grad.flatten(1), shown.bags, mode="sum")
        return summed.unflatten(1, grad.shape[1:]), None


class _Unpad(torch.autograd.Function):
    """Padded slots -> packed [K, H, D], or those that have a slot; each from its first slot. Other slots have no
    gradient."""

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
    """Slots [S, ...] -> packed [K, ...], or those that have a slot."""
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
    out = _causal(q, k, v, layout, scale, window, softcap, sinks)
    if not layout.attends_both_ways(window):
        return out
    images = layout.images(window)
    of_images = _in_blocks((q, k, v), images, scale, window, softcap, sinks)
    return of_images if images.queries.packed is None else out.index_copy(0, images.queries.packed, of_images)


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedLayout,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As _attend(), without what images see after them."""
    fits = v.shape[-1] == q.shape[-1] and sinks is None
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
    """[K, H, D]: causal attention in padded blocks; q [K, H, D], k and v [K, KV, D]."""
    return _in_blocks(qkv, layout.own_queries, scale, window, softcap, sinks)


def _in_blocks(
    qkv: Sequence[Tensor],
    padded: Padded,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[k, H, D], of the packed tokens that have queries in the blocks."""
    q, k, v = (pad(x, shown) for x, shown in zip(qkv, (padded.queries, padded.keys, padded.keys), strict=True))
    outputs = []
    # split, not slices: a split's gradient is one concatenation, but n slices' is n full-size tensors of zeros.
    keys = [block.rows * block.length for block in padded.blocks]
    parts = (q.split([block.rows * block.queries for block in padded.blocks]), k.split(keys), v.split(keys))
    for block, *tensors in zip(padded.blocks, *parts, strict=True):
        qb, kb, vb = (x.unflatten(0, (block.rows, -1)).transpose(1, 2) for x in tensors)
        if block.first is None:
            out = causal_attention(qb, kb, vb, scale=scale, window=window, softcap=softcap, sinks=sinks)
        elif block.hides_nothing(window) and softcap is None and sinks is None:
            out = full_attention(qb, kb, vb, scale=scale)
        else:
            mask = block.mask(window, sinks is not None, q.dtype)
            out = suffix_attention(qb, kb, vb, mask, scale=scale, softcap=softcap, sinks=sinks)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return unpad(outputs[0] if len(outputs) == 1 else torch.cat(outputs), padded.queries)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, reach_of_mask)
