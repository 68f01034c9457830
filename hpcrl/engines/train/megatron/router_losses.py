"""Router losses of a mixture of experts, for the load balance and for the size of logits.

Megatron's own losses are means over a micro-batch, so they depend on how the batch is split. Here, losses are per
sequence: a row's loss is the same in any micro-batch on any rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from hpcrl.engines.train.megatron.packing import Packed
from hpcrl.engines.train.megatron.replay import OfMicroBatch, routers_of
from hpcrl.engines.train.megatron.spec import MegatronConfig
from hpcrl.metrics.stats import Stat, Stats
from hpcrl.rollout.batch import Batch, Norms


@dataclass(frozen=True)
class _Tokens:
    """A rank's tokens.

    Attributes:
        rows: int64 [t], each token's row in the micro-batch; 0 for padding.
        shares: float32 [t], each token's weight in the mini-batch's loss, which is the mean over sequences of their
            means over tokens; 0 for padding.
        lengths: float32 [B], the rows' lengths, counted over all ranks.
    """

    rows: Tensor
    shares: Tensor
    lengths: Tensor


class RouterLosses:
    """Measures the losses of all routers of a rank, and adds them with their coefficients to the mini-batch's loss.

    Let p [E] be the softmax of a token's logits (in DeepSeek-V3, the sigmoids divided by their sum), and f [E] each
    expert's share of the choices of the token's sequence. The token's loss is aux_loss * E * sum(f * p) + z_loss *
    logsumexp(logits)^2. f has no gradient, and counts choices without the router's bias.

    Args:
        num_parts: With sequence parallelism, a router gets one of num_parts parts of its context-parallel rank's
            tokens. Otherwise 1.
        part: The number of this part, otherwise 0.
    """

    def __init__(self, chunks: Sequence[Any], own: MegatronConfig, num_parts: int, part: int):
        self._coefficients = torch.tensor([own.aux_loss, own.z_loss], device=torch.cuda.current_device())
        self._adds = own.aux_loss > 0 or own.z_loss > 0
        self._num_parts, self._part = num_parts, part
        self.norms = Norms(1.0, 1.0)
        self._sums = torch.zeros_like(self._coefficients)  # sums of both losses since see_mini_batch()
        self._group = parallel_state.get_tensor_and_context_parallel_group()
        self._tokens: list[OfMicroBatch[_Tokens]] = []
        self._scores: Callable[[Tensor], Tensor] = _softmax
        for _, router in routers_of(chunks):
            tokens = OfMicroBatch[_Tokens]()
            self._tokens.append(tokens)
            if router.score_function == "sigmoid":
                self._scores = _sigmoids
            router.gating = functools.partial(self._gating, router.gating, router.topk, tokens)

    def see_mini_batch(self, norms: Norms) -> None:
        """Begin a mini-batch with these norms."""
        self.norms = norms
        self._sums.zero_()

    def stats(self, batch: Batch, rows: Sequence[int], num_layers: int) -> Stats:
        """Both losses, without coefficients, as means over these rows (the mini-batch of one data-parallel rank) and
        over the model's num_layers layers with experts. Called after the last micro-batch. Collective over the ranks
        that share the rows."""
        sums = self._sums.clone()
        for group in (self._group, parallel_state.get_pipeline_model_parallel_group()):
            if group.size() > 1:
                dist.all_reduce(sums, group=group)
        share = float(_weights(batch)[list(rows)].sum()) / self.norms.sequences if rows else 0.0
        names = ("actor/moe_aux_loss", "actor/moe_z_loss")
        return {name: Stat(total / num_layers, share) for name, total in zip(names, sums.tolist(), strict=True)}

    def expect_recomputation(self, recomputes: bool) -> None:
        """See OfMicroBatch."""
        for tokens in self._tokens:
            tokens.expect_recomputation(recomputes)

    def see(self, batch: Batch, packed: Packed) -> None:
        """Set the micro-batch of the next forward pass. Rows without a token to be trained on have no losses."""
        lengths = batch.lengths
        shares = packed.sources.new_zeros(len(packed.sources), dtype=torch.float32)
        rows = torch.zeros_like(packed.sources)
        if batch.num_sequences:
            real = packed.sources >= 0
            of_token = batch.row_ids[packed.sources.clamp(min=0)]
            weights = _weights(batch)
            rows = torch.where(real, of_token, 0)
            of_row = torch.where(weights > 0, weights / (lengths * self.norms.sequences), 0.0)
            shares = of_row[rows] * real
        rows, shares = (values.chunk(self._num_parts)[self._part] for values in (rows, shares))
        for tokens in self._tokens:
            tokens.value = _Tokens(rows, shares, lengths.float())

    def _gating(
        self, gating: Callable[[Tensor], Tensor], topk: int, of_micro_batch: OfMicroBatch[_Tokens], states: Tensor
    ) -> Tensor:
        """The router's logits, whose backward pass also adds the losses' gradient. Collective over the ranks that share
        sequences."""
        logits, tokens = gating(states), of_micro_batch.take()
        if tokens is None or not torch.is_grad_enabled() or not len(tokens.lengths):
            return logits
        flat = logits.view(-1, logits.shape[-1]).float()
        with torch.set_grad_enabled(self._adds):
            shares = self._chosen(flat.detach(), topk, tokens) / (topk * tokens.lengths[:, None])
            balance = flat.shape[-1] * (shares[tokens.rows] * self._scores(flat)).sum(-1)
            losses = torch.stack([balance, flat.logsumexp(-1).square()]) @ tokens.shares
            self._sums += losses.detach()
            return _WithLoss.apply(logits, losses @ self._coefficients) if self._adds else logits

    def _chosen(self, logits: Tensor, topk: int, tokens: _Tokens) -> Tensor:
        """float32 [B, E]: for each row and expert, the number of choices on all ranks that share the row."""
        real = (tokens.shares > 0).float()
        chosen = torch.zeros_like(logits).scatter_(1, logits.topk(topk, dim=-1).indices, 1.0) * real[:, None]
        counts = logits.new_zeros(len(tokens.lengths), logits.shape[-1]).index_add_(0, tokens.rows, chosen)
        if self._group.size() > 1:
            dist.all_reduce(counts, group=self._group)
        return counts


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _sigmoids(logits: Tensor) -> Tensor:
    """Sigmoids divided by their sum (DeepSeek-V3, arXiv 2412.19437)."""
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def _weights(batch: Batch) -> Tensor:
    """float32 [B]: weights of rows; 0 for rows without a token to be trained on."""
    learned = torch.zeros(batch.num_sequences, device=batch.row_ids.device)
    learned[batch.row_ids[batch.loss_mask]] = 1.0
    return learned if batch.weights is None else learned * batch.weights


class _WithLoss(torch.autograd.Function):
    """Returns a tensor; its backward pass adds a loss's gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones((), dtype=torch.float32)
