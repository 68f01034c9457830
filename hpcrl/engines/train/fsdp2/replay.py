"""transformers' routers, replaying the generator's choice of experts (R3, arXiv 2510.11370)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from hpcrl.engines.expert_routes import choices_of
from hpcrl.engines.train.fsdp2.routers import ObservedRouter
from hpcrl.rollout.batch import Batch


class RouterReplay:
    """Replaces the choice of experts in all routers of a model. The chosen experts' weights are computed by the router
    and get gradients as before. Before replay_of() is called, routers make their own choice.

    Args:
        routers: Of all layers with experts, in order.
    """

    def __init__(self, routers: Sequence[ObservedRouter]):
        self._routers, self._on = routers, True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Context in which all routers make their own choice."""
        self._on = False
        self._choose(None)
        try:
            yield
        finally:
            self._on = True

    def replay_of(self, batch: Batch, kept: Tensor | None) -> None:
        """In the next forward passes and their recomputation, use the generator's choices for the tokens `kept` of this
        batch (None means all). Group members that share a prefix use the choices for its first occurrence. ValueError
        if the rollouts have no routes."""
        self._choose(None)
        if not self._on or not batch.num_tokens:
            return
        chosen = choices_of(batch, len(self._routers))
        self._choose(chosen if kept is None else chosen[kept])

    def _choose(self, chosen: Tensor | None) -> None:
        """int64 [K, layers, experts per token]; -1, or None for all tokens: the router's own choice."""
        for layer, router in enumerate(self._routers):
            router.chosen = None if chosen is None else chosen[:, layer]
