"""The KV cache's memory: one tensor per layer, and each block's place in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hpcrl.engines.gen.native.architecture import Architecture
from hpcrl.rollout.device_copies import to_device

NO_INDEX = -1


def block_bytes(architecture: Architecture, block_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of a block in all layers."""
    numbers = architecture.num_kv_heads * architecture.head_dim
    numbers *= architecture.cached_tensors * architecture.num_attention_layers
    return numbers * block_tokens * dtype.itemsize


class KVCache:
    """Keys and values of blocks: one tensor [2 (k, v), places, kv_heads, block_tokens, head_dim] per layer with
    attention, with latent attention [1, places, 1, block_tokens, head_dim]. A block's place is its index in these
    tensors.

    compact() puts blocks with a similar number of readers next to each other, so attention reads each range of places
    (`ranges`) with one batched product and without a copy. All places hold finite numbers, so numbers that do not
    belong to a request can be masked.
    """

    def __init__(
        self, architecture: Architecture, max_blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ):
        self.block_tokens, self.max_blocks, self._device = block_tokens, max_blocks, device
        self._shape = (architecture.num_kv_heads, block_tokens, architecture.head_dim)
        layer = torch.zeros(architecture.cached_tensors, 0, *self._shape, dtype=dtype, device=device)
        self.layers = [layer] * architecture.num_attention_layers
        self.clear()

    def clear(self) -> None:
        """Free the memory."""
        self.places = np.full(self.max_blocks, NO_INDEX)  # int64 [blocks]: each block's place
        self.ranges: list[tuple[int, int]] = []  # (first place, end) of each group of blocks
        self.capacity = 0
        self._most = 0  # maximum number of blocks held at once since the last trim
        self.layers = [layer[:, :0].clone() for layer in self.layers]

    def compact(self, groups: Sequence[np.ndarray], others: np.ndarray, capacity: int | None = None) -> None:
        """Move all blocks in use (int64 [n] each) to new places, and lose the contents of all other blocks.

        The first group, which changes most, gets the first places; the further groups get the last places; the others
        are between them. If the blocks do not fit, memory grows to `capacity` blocks or, by default, by at least a
        quarter, since growing copies everything.
        """
        blocks = np.concatenate((*groups, others))
        old, self._most = self.places, max(self._most, len(blocks))
        if capacity is None:
            enough = len(blocks) <= self.capacity
            capacity = self.capacity if enough else min(self.max_blocks, max(len(blocks), self.capacity * 5 // 4))
        ends = capacity - np.cumsum([0, *map(len, groups[1:])])
        self.ranges = [(0, len(groups[0])), *zip(ends[1:].tolist(), ends[:-1].tolist(), strict=True)]
        self.places = np.full(self.max_blocks, NO_INDEX)
        for group, (first, end) in zip(groups, self.ranges, strict=True):
            self._place(group, old, first, end)
        self._place(others, old, len(groups[0]), int(ends[-1]))
        self._move(old[blocks], self.places[blocks], capacity)
        self.capacity = capacity

    def _place(self, group: np.ndarray, old: np.ndarray, first: int, end: int) -> None:
        """Assign places in this range to blocks. A block that already has a place in the range keeps it."""
        at = old[group]
        stays = (at >= first) & (at < end)
        self.places[group[stays]] = at[stays]
        vacant = np.ones(end - first, dtype=bool)
        vacant[at[stays] - first] = False
        self.places[group[~stays]] = first + np.flatnonzero(vacant)[: np.count_nonzero(~stays)]

    def _move(self, sources: np.ndarray, targets: np.ndarray, capacity: int) -> None:
        resized = capacity != self.capacity
        moves = (sources != NO_INDEX) & ((sources != targets) | resized)
        if not resized and not moves.any():
            return
        if resized:
            self._resize(sources[moves], targets[moves], capacity)
            return
        source, target = (to_device(torch.from_numpy(at[moves]), self._device) for at in (sources, targets))
        for layer in self.layers:
            layer[:, target] = layer[:, source]

    def _resize(self, sources: np.ndarray, targets: np.ndarray, capacity: int) -> None:
        """Move blocks into tensors of another size, layer by layer, so at most one layer exists in both sizes."""
        source_of = np.zeros(capacity, dtype=np.int64)  # places without a block get some old numbers, which are finite
        source_of[targets] = sources
        index = to_device(torch.from_numpy(source_of), self._device)
        for i, layer in enumerate(self.layers):
            self.layers[i] = layer.new_zeros(len(layer), capacity, *self._shape)
            if len(sources):  # write directly into the new tensor, since indexing would make another copy
                torch.index_select(layer, 1, index, out=self.layers[i])

    def trim(self, groups: Sequence[np.ndarray], others: np.ndarray) -> None:
        """compact(), and reduce memory to what was needed at once since the last trim."""
        now = sum(map(len, groups)) + len(others)
        self.compact(groups, others, max(now, min(self.capacity, self._most)))
        self._most = now

    def write(self, layer: int, places: Tensor, slots: Tensor, kv: Tensor) -> None:
        """Store `kv` [T, 2 (or 1), kv_heads, head_dim], the keys and values of T tokens: each at its block's place and
        at its slot, the position in the block."""
        self.layers[layer][:, places, :, slots] = kv

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy the contents of blocks (from, to)."""
        if blocks:
            source, target = to_device(torch.from_numpy(self.places[np.array(blocks).T]), self._device)
            for layer in self.layers:
                layer[:, target] = layer[:, source]
