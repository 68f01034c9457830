"""Megatron's routers, replaying the generator's choice of experts (R3, arXiv 2510.11370)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hpcrl.engines.expert_routes import choices_of
from hpcrl.engines.train.megatron.packing import Packed
from hpcrl.rollout.batch import Batch

T = TypeVar("T")


class OfMicroBatch(Generic[T]):
    """A value that a router needs in a micro-batch's forward pass, and again if the backward pass recomputes it."""

    def __init__(self) -> None:
        self.value: T | None = None  # for the next forward pass
        self._recomputed: list[T | None] | None = None  # for micro-batches whose backward pass is pending

    def expect_recomputation(self, recomputes: bool) -> None:
        """Set whether the next forward passes, which have no gradients, are recomputed in the backward passes."""
        self._recomputed = [] if recomputes else None

    def take(self) -> T | None:
        """The value for the micro-batch that the router computes now."""
        if self._recomputed is None:
            return self.value
        if torch.is_grad_enabled():
            return self._recomputed.pop(0)
        self._recomputed.append(self.value)
        return self.value


def routers_of(chunks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """(layer number, router) for a rank's layers with experts."""
    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
        if hasattr(layer.mlp, "router"):
            yield layer.layer_number - 1, layer.mlp.router


class _Choice:
    """Replaces one router's choice of experts. The chosen experts' weights are computed and get gradients as before.

    Args:
        own: An earlier replacement, which makes the router's own choice.
    """

    def __init__(self, layer: int, own: Any) -> None:
        self.layer, self._own = layer, own
        self.chosen = OfMicroBatch[Tensor]()  # int64 [tokens, experts per token], -1: the router's own choice

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Called by the router like the same method of megatron.core's RouterReplay."""
        assert default_compute_topk is not None
        compute = default_compute_topk if self._own is None else self._own.get_replay_topk
        values, own = compute(scores, topk, num_groups, group_topk)
        chosen = self.chosen.take()
        if chosen is None:
            return values, own
        chosen = torch.where(chosen < 0, own, chosen)
        return scores.gather(1, chosen), chosen


class ChosenExperts:
    """Replaces the choices of all routers of a rank.

    Args:
        expert_layers: The model's layers with experts.
        num_parts: With sequence parallelism, a rank's routers get one of num_parts parts of its tokens. Otherwise 1.
        part: The number of this part, otherwise 0.
    """

    def __init__(self, chunks: Sequence[Any], expert_layers: Sequence[int], num_parts: int, part: int):
        self._num_layers, self._num_parts, self._part = len(expert_layers), num_parts, part
        self._choices = []
        for layer, router in routers_of(chunks):
            router.router_replay = choice = _Choice(expert_layers.index(layer), router.router_replay)
            self._choices.append(choice)
        self._on = True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Context in which all routers make their own choice."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def expect_recomputation(self, recomputes: bool) -> None:
        """Whether the next forward passes, which have no gradients, are recomputed in the backward passes."""
        for choice in self._choices:
            choice.chosen.expect_recomputation(recomputes)

    def see(self, batch: Batch, packed: Packed) -> None:
        """Use the generator's choices for this micro-batch's tokens in the next forward pass. ValueError if rollouts
        have no routes."""
        for choice in self._choices:
            choice.chosen.value = None
        if not self._on or not batch.num_tokens:
            return
        routes = choices_of(batch, self._num_layers)
        mine = routes[packed.sources].masked_fill((packed.sources < 0)[:, None, None], -1)
        mine = mine.chunk(self._num_parts)[self._part]
        for choice in self._choices:
            choice.chosen.value = mine[:, choice.layer]
