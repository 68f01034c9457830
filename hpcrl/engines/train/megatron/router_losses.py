"""Router losses of a mixture of experts: load balance, and size of the logits.

Megatron's own losses are means over a micro-batch, and would depend on the batch's split. Here they are per sequence: a
row's loss is equal in any micro-batch, on any rank.
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
        rows: int64 [t], each token's row in the micro-batch, 0 for padding.
        shares: float32 [t], each token's share in the mean over the mini-batch's sequences of means over their tokens;
            0 for padding.
        lengths: float32 [B], the rows' lengths on all ranks.
    """

    rows: Tensor
    shares: Tensor
    lengths: Tensor


class RouterLosses:
    """The losses of all routers of a rank: measured, and added with their coefficients to the mini-batch's loss.

    With the softmax p [E] of a token's logits (DeepSeek-V3: the sigmoids, normalised to sum 1), and the share f [E] of
    its sequence's choices for each of E experts, a token has aux_loss * E * sum(f * p) + z_loss * logsumexp(logits)^2;
    f has no gradient, and counts choices without a bias.

    Args:
        num_parts: with sequence parallelism, a router gets one of num_parts parts of its context parallel rank's
            tokens; otherwise 1.
        part: the number of this part; otherwise 0.
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
        """Set the mini-batch of the next micro-batches."""
        self.norms = norms
        self._sums.zero_()

    def stats(self, batch: Batch, rows: Sequence[int], num_layers: int) -> Stats:
        """Both losses of these rows (the mini-batch of one data-parallel rank), as means over sequences and the model's
        num_layers layers with experts, without coefficients. Collective over the ranks of the rows, after the last
        micro-batch."""
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
        """The router's logits, whose backward pass adds the losses' gradient. Collective over the ranks that share
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
        """float32 [B, E]: the choices of each row's tokens, on all ranks that share the row."""
        real = (tokens.shares > 0).float()
        chosen = torch.zeros_like(logits).scatter_(1, logits.topk(topk, dim=-1).indices, 1.0) * real[:, None]
        counts = logits.new_zeros(len(tokens.lengths), logits.shape[-1]).index_add_(0, tokens.rows, chosen)
        if self._group.size() > 1:
            dist.all_reduce(counts, group=self._group)
        return counts


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _sigmoids(logits: Tensor) -> Tensor:
    """Divided by their sum (DeepSeek-V3, arXiv 2412.19437)."""
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
