"""Attention over a KV cache in blocks: prefill of new tokens, and decoding of one token per request.

The queries of all requests that use a block are rows of one matrix. So keys and values are not copied or repeated, for
q heads that share a kv head or for requests that share a prefix. Scores are computed block by block, then put in each
request's token order. So the softmax is an ordinary one, and a layer's mask, such as a window, depends only on
positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hpcrl.engines.blocked_attention import QUERY_BLOCK, causal_attention, masked_attention
from hpcrl.engines.gen.native.architecture import Architecture
from hpcrl.engines.gen.native.kv import KVCache
from hpcrl.rollout.device_copies import to_device


@dataclass(frozen=True)
class DecodeAttention:
    """How R rows, with one query each, read the cache. A unit is one kv head for one row and one block that this row
    reads. Units are in the order in which the products over blocks compute them.

    Args:
        places: int64 [R, B], the places of each row's blocks in token order.
        products: Ranges of places, and for each the range of its units' q heads.
        queries: int64 [units], the row and kv head of each unit.
        in_order: int64 [R * heads * B], the unit and q head for each row, head and block, in the order of scores.
        by_unit: int64 [units * q heads per kv head], the inverse of in_order.
        bags: int64, the units of each row and kv head, concatenated.
        offsets: int64 [R * kv_heads], the start of each row and kv head in `bags`.
    """

    places: Tensor
    products: tuple[tuple[slice, slice], ...]
    queries: Tensor
    in_order: Tensor
    by_unit: Tensor
    bags: Tensor
    offsets: Tensor

    @classmethod
    def plan(cls, cache: KVCache, places: np.ndarray, counts: np.ndarray, arch: Architecture) -> DecodeAttention:
        """The plan if row r reads counts[r] >= 0 blocks, at the first of places[r]; int64 [R, B] and [R]."""
        heads, group = arch.num_kv_heads, arch.num_heads // arch.num_kv_heads
        rows, width = places.shape
        row, index = np.nonzero(np.arange(width) < counts[:, None])
        place = places[row, index]
        # Number the readers of each block.
        order = place.argsort(kind="stable")
        reader = np.empty_like(place)
        reader[order] = np.arange(len(place)) - np.searchsorted(place[order], place[order])

        head, part = np.arange(heads), np.arange(group)
        unit, num_units, products = np.empty((len(place), heads), dtype=np.int64), 0, []
        for first, end in cache.ranges:
            if first == end:
                continue
            inside = (place >= first) & (place < end)
            most = int(reader[inside].max()) + 1
            local, number = place[inside, None] - first, reader[inside, None]
            unit[inside] = num_units + (local * heads + head) * most + number
            until = num_units + (end - first) * heads * most
            products.append((slice(first, end), slice(num_units * group, until * group)))
            num_units = until
        row_head = row[:, None] * heads + head
        stretch = (row_head[:, :, None] * group + part) * width + index[:, None, None]
        unit_head = unit[:, :, None] * group + part
        # Where a block has fewer readers than others, or a row fewer blocks, entries stay 0, and results are masked or
        # not used.
        queries = np.zeros(num_units, dtype=np.int64)
        queries[unit] = row_head
        in_order = np.zeros(rows * heads * group * width, dtype=np.int64)
        in_order[stretch] = unit_head
        by_unit = np.zeros(num_units * group, dtype=np.int64)
        by_unit[unit_head] = stretch
        bags = unit.flatten()[row_head.argsort(axis=None, kind="stable")]
        sizes = np.repeat(counts, heads)
        arrays = (queries, in_order, by_unit, bags, sizes.cumsum() - sizes)
        at, *tensors = (to_device(torch.from_numpy(array), cache.layers[0].device) for array in (places, *arrays))
        return cls(at, tuple(products), *tensors)

    def mask(self, positions: Tensor, block_tokens: int, dtype: torch.dtype, window: int | None) -> Tensor:
        """[R, 1, B * block_tokens]: 0 where the query at its row's position attends, else -inf."""
        keys = torch.arange(self.places.shape[1] * block_tokens, device=positions.device)
        unseen = keys > positions[:, None]
        if window is not None:
            unseen |= keys <= positions[:, None] - window
        return torch.zeros(unseen.shape, dtype=dtype, device=unseen.device).masked_fill_(unseen, -math.inf)[:, None]

    def attend(self, q: Tensor, kv: Tensor, mask: Tensor, arch: Architecture, sinks: Tensor | None = None) -> Tensor:
        """The attention of `q` [R, heads, head_dim], as [R, heads * value_dim]. `kv` is a layer of the cache; `mask`
        [R, 1, L] is added to the scores; `sinks` [heads] are Layer.sinks."""
        (rows, heads, size), (k, v) = q.shape, arch.keys_and_values(kv)
        num_kv_heads, block = k.shape[1:3]
        group = heads // num_kv_heads
        queries = q.reshape(rows * num_kv_heads, group * size).index_select(0, self.queries).view(-1, size)
        scores = self._products(queries, k.transpose(2, 3)).index_select(0, self.in_order).view(rows, heads, -1)
        if (cap := arch.attention_softcap) is None:
            scores = torch.add(mask, scores, alpha=arch.attention_scale)
        else:
            scores = scores.mul_(arch.attention_scale / cap).tanh_().mul_(cap).add_(mask)
        probs = scores.softmax(-1, dtype=torch.float32)
        if sinks is not None:  # the part of the sum of exponentials that is not the sink's
            probs = probs * (scores.float().logsumexp(-1) - sinks).sigmoid()[..., None]
        parts = self._products(probs.to(v.dtype).view(-1, block).index_select(0, self.by_unit), v)
        sums = F.embedding_bag(self.bags, parts.view(-1, group * arch.value_dim).float(), self.offsets, mode="sum")
        return sums.view(rows, -1).to(q.dtype)

    def _products(self, left: Tensor, right: Tensor) -> Tensor:
        """[units * q heads, Y]: each row of `left` [units * q heads, X] times the matrix of its block and kv head in
        `right` [places, kv_heads, X, Y]."""
        x, y = right.shape[2:]
        products = left.new_empty(left.shape[0], y)
        for places, rows in self.products:
            matrices = right[places].flatten(0, 1)
            shape = (matrices.shape[0], -1)
            torch.bmm(left[rows].view(*shape, x), matrices, out=products[rows].view(*shape, y))
        return products


@dataclass(frozen=True)
class PrefillAttention:
    """How N rows of new tokens, T in total, attend to each other and to their rows' cached tokens.

    Args:
        places: int64 [T], the place of each token's block.
        slots: int64 [T], each token's position in its block.
        padded: int64 [T], the tokens' indices in N rows of equal length; None if all rows already have this length.
        shape: N and the length of these rows.
        past: int64 [N, B], the places of the rows' cached blocks; None if nothing is cached.
        starts: int64 [N], the number of cached tokens per row.
    """

    places: Tensor
    slots: Tensor
    padded: Tensor | None
    shape: tuple[int, int]
    past: Tensor | None
    starts: Tensor

    @classmethod
    def plan(cls, cache: KVCache, places: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> PrefillAttention:
        """The plan if row n, with blocks at places[n], has starts[n] cached tokens and gets new tokens up to ends[n].
        `places` is int64 [N, B], `starts` and `ends` are int64 [N]."""
        block, device, lengths = cache.block_tokens, cache.layers[0].device, ends - starts
        longest, most = int(lengths.max()), int(starts.max())
        row, column = np.nonzero(np.arange(longest) < lengths[:, None])
        position = starts[row] + column
        past = places[:, : -(-most // block)]
        arrays = (places[row, position // block], position % block, row * longest + column, past, starts)
        at, slots, padded, known, begin = (to_device(torch.from_numpy(array), device) for array in arrays)
        full = len(row) == longest * len(lengths)
        return cls(at, slots, None if full else padded, (len(lengths), longest), known if most else None, begin)

    def attend(
        self, heads: Tensor, kv: Tensor | None, arch: Architecture, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """The attention of the new tokens, as [T, heads * value_dim]. `heads` is [T, heads + 2 (or 1) kv_heads,
        head_dim], `kv` a layer of the cache, which may be None if nothing is cached, `window` as in
        Architecture.windows, and `sinks` [heads] are Layer.sinks."""
        if self.padded is not None:
            count = self.shape[0] * self.shape[1]
            heads = heads.new_zeros(count, *heads.shape[1:]).index_copy_(0, self.padded, heads)
        by_row = heads.view(*self.shape, *heads.shape[1:]).transpose(1, 2)
        q, new = by_row[:, : arch.num_heads], by_row[:, arch.num_heads :]
        new = new.unflatten(1, (-1, arch.num_kv_heads)).transpose(0, 1)
        scale, softcap = arch.attention_scale, arch.attention_softcap
        if self.past is None:  # padding is on the right, so no token attends to it
            k, v = arch.keys_and_values(new)
            out = causal_attention(q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks)
        else:
            assert kv is not None
            cached = kv[:, self.past].transpose(2, 3).flatten(3, 4)
            k, v = arch.keys_and_values(torch.cat((cached, new), dim=3))
            parts = [
                masked_attention(
                    part, k, v, self._visible(i * QUERY_BLOCK, part.shape[2], k.shape[2], window), scale, softcap, sinks
                )
                for i, part in enumerate(q.split(QUERY_BLOCK, dim=2))
            ]
            out = torch.cat(parts, dim=2)
        out = out.transpose(1, 2).reshape(-1, arch.num_heads * arch.value_dim)
        return out if self.padded is None else out[self.padded]

    def _visible(self, first: int, count: int, num_keys: int, window: int | None) -> Tensor:
        """bool [N, 1, count, num_keys]: which keys `count` new tokens from `first` on attend to. Cached keys come
        before new keys."""
        key = torch.arange(num_keys, device=self.starts.device)
        new = num_keys - self.shape[1]  # where the new keys begin
        query = new + torch.arange(first, first + count, device=self.starts.device)[:, None]
        starts = self.starts[:, None, None]
        visible = (key < starts) | ((key >= new) & (key <= query))
        if window is not None:
            position = torch.where(key < new, key, key - new + starts)
            visible &= position > query - new + starts - window
        return visible[:, None]
