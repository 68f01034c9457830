"""The losses of Megatron's routers (hpcrl.engines.train.router_losses).

Megatron's own losses are means over a micro-batch, so they depend on how the batch is split.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from hpcrl.engines.train.megatron.packing import Packed
from hpcrl.engines.train.megatron.replay import OfMicroBatch, routers_of
from hpcrl.engines.train.megatron.spec import MegatronConfig
from hpcrl.engines.train.router_losses import RoutedTokens, RouterLosses, token_shares
from hpcrl.rollout.batch import Batch


class MegatronRouterLosses(RouterLosses):
    """The losses of all routers of a rank. Those of frozen routers are only measured.

    Args:
        num_parts: With sequence parallelism, a router gets one of num_parts parts of its context-parallel rank's
            tokens. Otherwise 1.
        part: The number of this part, otherwise 0.
    """

    def __init__(self, chunks: Sequence[Any], own: MegatronConfig, num_parts: int, part: int):
        groups = (
            parallel_state.get_tensor_and_context_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        )
        super().__init__(own.aux_loss, own.z_loss, torch.device(torch.cuda.current_device()), groups)
        self._num_parts, self._part = num_parts, part
        self._tokens: list[OfMicroBatch[RoutedTokens]] = []
        for _, router in routers_of(chunks):
            tokens = OfMicroBatch[RoutedTokens]()
            self._tokens.append(tokens)
            sigmoid = router.score_function == "sigmoid"
            trained = router.weight.requires_grad
            router.gating = functools.partial(self._gating, router.gating, router.topk, sigmoid, trained, tokens)

    def expect_recomputation(self, recomputes: bool) -> None:
        """See OfMicroBatch."""
        for tokens in self._tokens:
            tokens.expect_recomputation(recomputes)

    def see(self, batch: Batch, packed: Packed) -> None:
        """Set the micro-batch of the next forward pass."""
        shares = packed.sources.new_zeros(len(packed.sources), dtype=torch.float32)
        rows = torch.zeros_like(packed.sources)
        if batch.num_sequences:
            real = packed.sources >= 0
            rows = torch.where(real, batch.row_ids[packed.sources.clamp(min=0)], 0)
            shares = token_shares(batch, self.norms)[rows] * real
        rows, shares = (values.chunk(self._num_parts)[self._part] for values in (rows, shares))
        for tokens in self._tokens:
            tokens.value = RoutedTokens(rows, shares, batch.lengths.float())

    def _gating(
        self,
        gating: Callable[[Tensor], Tensor],
        topk: int,
        sigmoid: bool,
        trained: bool,
        of_micro_batch: OfMicroBatch[RoutedTokens],
        states: Tensor,
    ) -> Tensor:
        """The router's logits, whose backward pass also adds the losses' gradient. Collective over the ranks that share
        sequences."""
        logits, tokens = gating(states), of_micro_batch.take()
        return logits if tokens is None else self.add(logits, topk, tokens, sigmoid, trained=trained)
