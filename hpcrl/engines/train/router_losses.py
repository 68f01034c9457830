"""Router losses of a mixture of experts, for the load balance and for the size of logits.

Losses are per sequence, so a row's loss is the same in any micro-batch on any rank. Let p [E] be the softmax of a
token's logits (in DeepSeek-V3, the sigmoids divided by their sum), and f [E] each expert's share of the choices of the
token's sequence. The token's loss is aux_loss * E * sum(f * p) + z_loss * logsumexp(logits)^2. f has no gradient, and
counts choices without the router's bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.metrics.stats import Stat, Stats
from hpcrl.rollout.batch import Batch, Norms

METRICS = ("actor/moe_aux_loss", "actor/moe_z_loss")


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens of sequences whose logits a rank has.

    Attributes:
        rows: int64 [t], each token's row in the micro-batch; 0 for padding.
        shares: float32 [t], each token's weight in the mini-batch's loss, which is the mean over sequences of their
            means over tokens; 0 for padding.
        lengths: float32 [B], the rows' lengths, counted over all ranks.
        places: int64 [t], the index of each token's logits, which tokens of a common prefix share; None: their order.
    """

    rows: Tensor
    shares: Tensor
    lengths: Tensor
    places: Tensor | None = None


def row_weights(batch: Batch) -> Tensor:
    """float32 [B]: weights of rows; 0 for rows without a token to be trained on, which have no losses."""
    learned = torch.zeros(batch.num_sequences, device=batch.row_ids.device)
    learned[batch.row_ids[batch.loss_mask]] = 1.0
    return learned if batch.weights is None else learned * batch.weights


def token_shares(batch: Batch, norms: Norms) -> Tensor:
    """float32 [B]: the weight of each of a row's tokens in the mini-batch's loss."""
    weights = row_weights(batch)
    return torch.where(weights > 0, weights / (batch.lengths * norms.sequences), 0.0)


class RouterLosses:
    """Measures the losses of all routers of a rank, and adds them with their coefficients to the mini-batch's loss.

    Args:
        groups: Process groups over which losses are summed: first the ranks that share rows, which also sum choices,
            then those with other layers. None is a single rank.
    """

    def __init__(self, aux_loss: float, z_loss: float, device: torch.device, groups: Sequence[Any]):
        self._coefficients = torch.tensor([aux_loss, z_loss], device=device)
        self._adds = aux_loss > 0 or z_loss > 0
        self._groups = groups
        self.norms = Norms(1.0, 1.0)
        self._sums = torch.zeros_like(self._coefficients)  # sums of both losses since see_mini_batch()

    def see_mini_batch(self, norms: Norms) -> None:
        """Begin a mini-batch with these norms."""
        self.norms = norms
        self._sums.zero_()

    def stats(self, batch: Batch, rows: Sequence[int], num_layers: int) -> Stats:
        """Both losses, without coefficients, as means over these rows (the mini-batch of one data-parallel rank) and
        over the model's num_layers layers with experts. Called after the last micro-batch. Collective over the ranks
        that share the rows."""
        sums = self._sums.clone()
        for group in self._groups:
            _sum(sums, group)
        share = float(row_weights(batch)[list(rows)].sum()) / self.norms.sequences if rows else 0.0
        return {name: Stat(total / num_layers, share) for name, total in zip(METRICS, sums.tolist(), strict=True)}

    def add(
        self,
        logits: Tensor,
        topk: int,
        tokens: RoutedTokens,
        sigmoid: bool,
        *,
        trained: bool = True,
        measured: bool = True,
        factor: float = 1.0,
    ) -> Tensor:
        """A router's logits [..., E], whose backward pass also adds the losses' gradient. Collective over the ranks
        that share rows.

        Args:
            topk: Number of experts per token.
            trained: False if the router is frozen, so its losses are only measured.
            measured: False if this forward pass is repeated, so the losses are in the stats already.
            factor: What the engine multiplies its loss by before the backward pass.
        """
        if not torch.is_grad_enabled() or not len(tokens.lengths):
            return logits
        flat, adds = logits.reshape(-1, logits.shape[-1]).float(), self._adds and trained
        with torch.set_grad_enabled(adds):
            chosen = self._chosen(flat.detach(), topk, tokens) / (topk * tokens.lengths[:, None])
            weights = _at_logits(tokens.shares[:, None] * chosen[tokens.rows], tokens, len(flat))
            balance = flat.shape[-1] * (weights * (_sigmoids(flat) if sigmoid else flat.softmax(-1))).sum()
            size = (_at_logits(tokens.shares, tokens, len(flat)) * flat.logsumexp(-1).square()).sum()
            losses = torch.stack([balance, size])
            if measured:
                self._sums += losses.detach()
            return _WithLoss.apply(logits, losses @ self._coefficients, factor) if adds else logits

    def _chosen(self, logits: Tensor, topk: int, tokens: RoutedTokens) -> Tensor:
        """float32 [B, E]: for each row and expert, the number of choices on all ranks that share the row."""
        experts = logits.topk(topk, dim=-1).indices
        if tokens.places is not None:
            experts = experts[tokens.places]
        real = (tokens.shares > 0).float()[:, None].expand_as(experts)
        counts = logits.new_zeros(len(tokens.lengths) * logits.shape[-1])
        counts.index_add_(0, (tokens.rows[:, None] * logits.shape[-1] + experts).flatten(), real.flatten())
        _sum(counts, self._groups[0])
        return counts.view(len(tokens.lengths), -1)


def _sum(values: Tensor, group: Any) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, group=group)


def _at_logits(values: Tensor, tokens: RoutedTokens, count: int) -> Tensor:
    """[count, ...]: the sums over the tokens [t, ...] that share logits."""
    if tokens.places is None:
        return values
    return values.new_zeros(count, *values.shape[1:]).index_add_(0, tokens.places, values)


def _sigmoids(logits: Tensor) -> Tensor:
    """Sigmoids divided by their sum (DeepSeek-V3, arXiv 2412.19437)."""
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


class _WithLoss(torch.autograd.Function):
    """Returns a tensor; its backward pass adds a loss's gradient, times a factor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, gradient.new_full((), ctx.factor, dtype=torch.float32), None
