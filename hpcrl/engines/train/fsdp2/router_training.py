"""What trains transformers' routers besides the objective: losses, and the bias per expert."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hpcrl.engines.train.fsdp2.exchange import TokenRanks
from hpcrl.engines.train.fsdp2.frozen import NAMES
from hpcrl.engines.train.fsdp2.packed_attention import PackedLayout
from hpcrl.engines.train.fsdp2.routers import ObservedRouter, RouterTable
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.engines.train.router_bias import moved_biases
from hpcrl.engines.train.router_keys import BIAS
from hpcrl.engines.train.router_losses import RoutedTokens, RouterLosses, token_shares
from hpcrl.metrics.stats import Stats
from hpcrl.rollout.batch import Batch, Norms
from hpcrl.rollout.device_copies import to_device


class RouterTraining:
    """Measures the losses of all routers in the forward passes of a step and adds them, and moves their biases. A token
    of a common prefix counts for every row that has it. Frozen routers are only measured.

    Args:
        routers: Of all layers with experts, in order, as in the table.
        factor: What the engine multiplies its loss by before the backward pass.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        routers: Sequence[ObservedRouter],
        table: RouterTable,
        own: FSDP2Config,
        ranks: TokenRanks,
        device: torch.device,
        factor: float,
    ):
        self._routers, self._table, self._factor, self._rate = routers, table, factor, own.expert_bias_rate
        group = ranks.all.group if ranks.all.size > 1 else None
        self._losses = RouterLosses(own.aux_loss, own.z_loss, device, (group,))
        self._owners = [owner_of_bias(hf, found.name) for found in table.found] if self._rate else []
        self._trained = [is_trained(hf, found.name) for found in table.found]
        self._counts = torch.zeros(len(routers), table.shape.num_experts, device=device)
        self._tokens = RoutedTokens(*torch.zeros(3, 0))
        self._repeats = False

    def see_mini_batch(self, norms: Norms) -> None:
        """Begin a mini-batch with these norms."""
        self._losses.see_mini_batch(norms)
        self._counts.zero_()

    def see(self, batch: Batch, layout: PackedLayout | None) -> None:
        """Measure the next forward pass, which is of this micro-batch on the host."""
        self.stop()
        if not batch.num_sequences:
            return
        device, places = self._counts.device, None
        rows = batch.row_ids.long()
        of_tokens = (rows, token_shares(batch, self._losses.norms)[rows], batch.lengths.float())
        rows, shares, lengths = (to_device(tensor, device) for tensor in of_tokens)
        if layout is not None:
            mine, places = layout.own(torch.arange(batch.num_tokens, device=device))
            rows, shares = (rows, shares) if mine is None else (rows[mine], shares[mine])
        self._tokens, self._repeats = RoutedTokens(rows, shares, lengths, places), False
        for layer, router in enumerate(self._routers):
            if self._table.found[layer].sigmoid is not None:
                router.see_logits = functools.partial(self._add, layer)
            if self._rate:
                router.see_choice = functools.partial(self._count, layer)

    def repeat(self) -> None:
        """The next forward passes are recomputations in the backward pass."""
        self._repeats = True

    def stop(self) -> None:
        """Measure no further forward pass."""
        for router in self._routers:
            router.see_logits = router.see_choice = None

    def stats(self, batch: Batch, rows: Sequence[int]) -> Stats:
        """See RouterLosses. Empty if the routers' scores are neither sigmoids nor a softmax."""
        if any(found.sigmoid is None for found in self._table.found):
            return {}
        return self._losses.stats(batch, rows, len(self._routers))

    def move_biases(self) -> None:
        """Move the biases by the mini-batch's counts. Collective over the default group."""
        if not self._rate:
            return
        biases = torch.stack([getattr(owner, BIAS) for owner in self._owners])
        moved = moved_biases(biases, self._counts.to(biases.device), self._rate)
        for owner, bias, trained in zip(self._owners, moved, self._trained, strict=True):
            if trained:
                getattr(owner, BIAS).copy_(bias)

    def _add(self, layer: int, logits: Tensor) -> Tensor:
        sigmoid = bool(self._table.found[layer].sigmoid)
        topk, trained, measured = self._table.shape.experts_per_token, self._trained[layer], not self._repeats
        return self._losses.add(
            logits, topk, self._tokens, sigmoid, trained=trained, measured=measured, factor=self._factor
        )

    def _count(self, layer: int, experts: Tensor) -> None:
        if self._repeats:
            return
        every = experts if self._tokens.places is None else experts[self._tokens.places]
        self._counts[layer].index_add_(0, every.flatten(), self._counts.new_ones(every.numel()))


def is_trained(hf: nn.Module, router: str) -> bool:
    """Whether a router, or that of a block which chooses experts itself, has weights that are not frozen."""
    module = hf.get_submodule(router)
    parts = [part for name, part in module.named_children() if name in NAMES] or [module]
    return any(p.requires_grad for part in parts for p in part.parameters())


def owner_of_bias(hf: nn.Module, router: str) -> Any:
    """The module that has a router's bias per expert: the router or its block. ValueError if there is none in
    float32."""
    for name in (router, router.rpartition(".")[0]):
        owner: Any = hf.get_submodule(name)
        if isinstance(bias := dict(owner.named_buffers(recurse=False)).get(BIAS), Tensor):
            if bias.dtype != torch.float32:
                raise ValueError(f"the bias of {router} is {bias.dtype}, not float32")
            return owner
    raise ValueError(f"{router} has no bias of experts that is not a parameter")
