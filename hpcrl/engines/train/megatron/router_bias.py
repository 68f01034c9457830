"""The biases of Megatron's routers (hpcrl.engines.train.router_bias)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from hpcrl.engines.train.megatron.packing import Packed
from hpcrl.engines.train.megatron.replay import OfMicroBatch, routers_of
from hpcrl.engines.train.router_bias import moved_biases
from hpcrl.rollout.batch import Batch, Norms


class RouterBias:
    """The biases of all routers of a rank, which move after an optimizer step.

    Megatron also counts padding, so biases would depend on how a batch is split. Padding is not counted here.

    Args:
        num_parts: With sequence parallelism, a router gets one of num_parts parts of its context-parallel rank's
            tokens. Otherwise 1.
        part: The number of this part, otherwise 0.
    """

    def __init__(self, chunks: Sequence[Any], rate: float, num_parts: int, part: int):
        self._rate, self._num_parts, self._part = rate, num_parts, part
        self._routers = [router for _, router in routers_of(chunks)]
        self._counts = [torch.zeros_like(router.expert_bias) for router in self._routers]
        self._real: list[OfMicroBatch[Tensor]] = []  # bool [t]: tokens that are not padding
        for router, counts in zip(self._routers, self._counts, strict=True):
            real = OfMicroBatch[Tensor]()
            self._real.append(real)
            router._apply_expert_bias = functools.partial(_count, real, counts)

    def see_mini_batch(self, norms: Norms) -> None:
        """Reset the counts of the previous mini-batch."""
        for counts in self._counts:
            counts.zero_()

    def expect_recomputation(self, recomputes: bool) -> None:
        """See OfMicroBatch."""
        for real in self._real:
            real.expect_recomputation(recomputes)

    def see(self, batch: Batch, packed: Packed) -> None:
        """Set the micro-batch of the next forward pass."""
        for real in self._real:
            real.value = (packed.sources >= 0).chunk(self._num_parts)[self._part]

    @torch.no_grad()
    def update(self) -> None:
        """Update the biases by the mini-batch's counts. Collective over the ranks of a pipeline stage."""
        if not self._routers:
            return
        biases = torch.stack([router.expert_bias for router in self._routers])
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        moved = moved_biases(biases, torch.stack(self._counts), self._rate, group)
        for router, bias in zip(self._routers, moved, strict=True):
            if router.weight.requires_grad:  # not frozen
                router.expert_bias.copy_(bias)


def _count(
    of_micro_batch: OfMicroBatch[Tensor], counts: Tensor, routing_map: Tensor, padding_mask: Tensor | None = None
) -> None:
    """Replaces a router's _apply_expert_bias. Adds the tokens' choices, bool [t, experts], to the counts."""
    real = of_micro_batch.take()
    if real is not None and torch.is_grad_enabled():
        counts += (routing_map & real[:, None]).sum(0)
