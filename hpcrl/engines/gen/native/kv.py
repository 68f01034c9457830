"""The KV cache: one row per slot, as long as the longest live request needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcrl.engines.gen.native.architecture import Architecture


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is at least `value`."""
    return -(-value // multiple) * multiple


class KVCache:
    """Keys and values: one tensor [2 (k, v), slots, kv_heads, capacity, head_dim] per layer.

    Rows of free slots and positions past a request's end hold finite garbage, so that masking it suffices.
    """

    def __init__(
        self, architecture: Architecture, num_slots: int, bucket: int, dtype: torch.dtype, device: torch.device
    ):
        self._shape = (2, num_slots, architecture.num_kv_heads)
        self._num_layers, self._head_dim, self._bucket = architecture.num_layers, architecture.head_dim, bucket
        self._dtype, self._device = dtype, device
        self._slots = torch.arange(num_slots, device=device)
        self.clear()

    def clear(self) -> None:
        """Free the memory."""
        self.capacity = 0
        self._layers = [self._zeros(0) for _ in range(self._num_layers)]

    def _zeros(self, capacity: int) -> Tensor:
        return torch.zeros(*self._shape, capacity, self._head_dim, dtype=self._dtype, device=self._device)

    def reserve(self, length: int) -> None:
        """Make room for `length` positions per slot; grows by at least half, so that copies stay rare."""
        if length <= self.capacity:
            return
        capacity = round_up(max(length, self.capacity * 3 // 2), self._bucket)
        for i, old in enumerate(self._layers):  # layer by layer: one layer's worth of extra memory at a time
            self._layers[i] = self._zeros(capacity)
            self._layers[i][..., : self.capacity, :] = old
        self.capacity = capacity

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Store the first P positions of `slots` [M]; kv: [2, M, kv_heads, P, head_dim]."""
        self._layers[layer][:, slots, :, : kv.shape[3]] = kv

    def append(self, layer: int, positions: Tensor, kv: Tensor) -> None:
        """Store position `positions[i]` of slot i for the first R slots; kv: [R, 2, kv_heads, head_dim]."""
        self._layers[layer][:, self._slots[: len(positions)], :, positions] = kv

    def live(self, layer: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `rows` slots, [rows * kv_heads, length, head_dim] each, without a copy."""
        k, v = self._layers[layer][:, :rows].flatten(1, 2)[:, :, :length]
        return k, v

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of whole slots."""
        for layer in self._layers:
            layer[:, targets, :, :length] = layer[:, sources, :, :length]
