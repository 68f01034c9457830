"""transformers' routers, replaying the generator's choice of experts (R3, arXiv 2510.11370)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hpcrl.engines.expert_routes import choices_of
from hpcrl.rollout.batch import Batch

TOLERANCE = 1e-2  # relative; experts' weights may be rounded to bf16


class RouterReplay:
    """Replaces the choice of experts in all routers of a model. The chosen experts' weights are computed and get
    gradients as before. Before replay_of() is called, routers make their own choice.

    ValueError if the model has no routers, or at the first forward pass if a router computes weights differently from
    Qwen3-MoE (softmax, top k, optionally divided by their sum).
    """

    def __init__(self, hf: nn.Module):
        self._routers = [module for module in hf.modules() if type(module).__name__.endswith("TopKRouter")]
        self._checked: set[int] = set()
        self._on = True
        self._chosen: Tensor | None = None  # int64 [K, layers, experts per token], -1: the router's own choice
        if not self._routers:
            kind = getattr(getattr(hf, "config", None), "model_type", type(hf).__name__)
            raise ValueError(f"trainer.router_replay: {kind} has no router that can replay choices; set it to false")
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(functools.partial(self._choose, layer))

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Context in which all routers make their own choice."""
        self._on, self._chosen = False, None
        try:
            yield
        finally:
            self._on = True

    def replay_of(self, batch: Batch, kept: Tensor | None) -> None:
        """In the next forward passes and their recomputation, use the generator's choices for the tokens `kept` of this
        batch (None means all). Group members that share a prefix use the choices for its first occurrence. ValueError
        if the rollouts have no routes."""
        self._chosen = None
        if not self._on or not batch.num_tokens:
            return
        chosen = choices_of(batch, len(self._routers))
        self._chosen = chosen if kept is None else chosen[kept]

    def _choose(self, layer: int, router: nn.Module, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, weights, own = output
        if layer not in self._checked:
            self._check(router, logits, weights, own)
            self._checked.add(layer)
        if self._chosen is None:
            return None
        chosen = self._chosen[:, layer]
        chosen = torch.where(chosen < 0, own, chosen)
        return logits, _weights(router, logits, chosen), chosen

    @staticmethod
    @torch.no_grad()
    def _check(router: nn.Module, logits: Tensor, weights: Tensor, own: Tensor) -> None:
        expected = _weights(router, logits, own)
        if expected.shape != weights.shape or not torch.allclose(expected, weights, rtol=TOLERANCE, atol=0.0):
            raise ValueError(
                f"trainer.router_replay: {type(router).__name__} weights experts differently from Qwen3-MoE, whose "
                "choices can be replayed; set it to false"
            )


def _weights(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    """The weights of these experts, differentiable."""
    weights = logits.softmax(-1, dtype=torch.float32).gather(1, chosen)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype)
