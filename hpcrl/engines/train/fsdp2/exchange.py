"""Differentiable collectives of the ranks that split a micro-batch's tokens.

Rank r of n has the tokens r, r + n, r + 2 n, ..., so each rank has its share of prompts and of responses: token p is
token p // n of rank p % n. The loss is the sum over ranks. So each rank computes its part of a gradient, from its
tokens or its part of a matrix, and the gradient is the sum over ranks. All functions and their backward passes are
collective over the axis's ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.rollout.device_copies import to_device


@dataclass(frozen=True)
class Axis:
    """A process group, its size, and this rank's index in it."""

    group: Any = None
    size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class TokenRanks:
    """The ranks of a data-parallel rank, which have the same rows: context x tensor ranks, of which consecutive ranks
    are tensor ranks. Token p belongs to context rank p % context.size."""

    tensor: Axis = Axis()
    context: Axis = Axis()
    all: Axis = Axis()

    @property
    def place(self) -> int:
        """This rank's place: token p belongs to the rank with place p % all.size."""
        return self.tensor.rank * self.context.size + self.context.rank


# The first name is torch 2.13's.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_tokens(own: Tensor, axis: Axis) -> Tensor:
    """[k, ...] of each rank -> [n k, ...] on every rank."""
    return own if axis.size == 1 else cast(Tensor, _Gather.apply(own, axis))


def sum_tokens(parts: Tensor, axis: Axis) -> Tensor:
    """[n k, ...] on every rank -> [k, ...] of this rank's tokens, summed over ranks."""
    return parts if axis.size == 1 else cast(Tensor, _Sum.apply(parts, axis))


def tokens_to_heads(own: Tensor, axis: Axis) -> Tensor:
    """[k, n h, D] of this rank's tokens -> [n k, h, D] of this rank's heads (DeepSpeed Ulysses, arXiv 2309.14509)."""
    return cast(Tensor, _Swap.apply(own, axis, True))


def heads_to_tokens(own: Tensor, axis: Axis) -> Tensor:
    """[n k, h, D] of this rank's heads -> [k, n h, D] of this rank's tokens."""
    return cast(Tensor, _Swap.apply(own, axis, False))


def share_of_parts(own: Tensor, parts: Sequence[int], axis: Axis) -> Tensor:
    """From a rank's rows of a fused matrix, which is split by rows, [R / n, ...]: the rank's rows of each of the
    matrices in it, which have parts[i] rows, in order."""
    return own if axis.size == 1 else cast(Tensor, _Parts.apply(own, tuple(parts), axis))


def assemble(own: Tensor, places: Tensor, count: int, axis: Axis) -> Tensor:
    """[count, ...] on every rank from the values [m, ...] that each rank has for the indices `places`. Every rank must
    then compute the same from the result, since a value's gradient comes only from its own rank."""
    return cast(Tensor, _Assemble.apply(own, places, count, axis))


def send_rows(own: Tensor, to: Sequence[int], from_: Sequence[int], axis: Axis) -> Tensor:
    """[sum(from_), ...]: from rank i, from_[i] of its rows, in its order. `own` [sum(to), ...] has the rows for each
    rank in order of ranks, of which rank i gets to[i]."""
    return cast(Tensor, _Send.apply(own, tuple(to), tuple(from_), axis))


def stack(own: Tensor, axis: Axis) -> Tensor:
    """[n, ...]: the tensors of all ranks, in order. No gradient."""
    parts = own.new_empty(axis.size, *own.shape)
    _gather_into(parts.view(-1, *own.shape[1:]), own.contiguous(), group=axis.group)
    return parts


def _all_gather(own: Tensor, axis: Axis) -> Tensor:
    return stack(own, axis).transpose(0, 1).flatten(0, 1)


def _reduce_scatter(parts: Tensor, axis: Axis) -> Tensor:
    by_rank = parts.unflatten(0, (-1, axis.size)).transpose(0, 1).contiguous()
    own = torch.empty_like(by_rank[0])
    _reduce_scatter_into(own, by_rank.flatten(0, 1), group=axis.group)
    return own


def _swap(own: Tensor, axis: Axis, to_heads: bool) -> Tensor:
    if to_heads:
        sent = own.unflatten(1, (axis.size, -1)).transpose(0, 1).contiguous()  # [n, k, h, D]
    else:
        sent = own.unflatten(0, (-1, axis.size)).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.flatten(0, 1), sent.flatten(0, 1), group=axis.group)
    return received.transpose(0, 1).flatten(0, 1) if to_heads else received.transpose(0, 1).flatten(1, 2)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _all_gather(own, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.axis), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _reduce_scatter(parts, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.axis), None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis, to_heads: bool) -> Tensor:
        ctx.axis, ctx.to_heads = axis, to_heads
        return _swap(own, axis, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _swap(grad, ctx.axis, not ctx.to_heads), None, None


@functools.lru_cache(maxsize=64)
def _routes(parts: tuple[int, ...], axis: Axis) -> tuple[Tensor, list[int], list[int]]:
    """A rank's rows in the order of their receivers, and the numbers of rows to and from each rank."""
    size = axis.size
    receivers = torch.cat([torch.arange(size).repeat_interleave(part // size) for part in parts]).view(size, -1)
    order = receivers[axis.rank].argsort(stable=True)
    return order, receivers[axis.rank].bincount(minlength=size).tolist(), (receivers == axis.rank).sum(1).tolist()


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, parts: tuple[int, ...], axis: Axis) -> Tensor:
        order, to, from_ = _routes(parts, axis)
        ctx.order, ctx.to, ctx.from_, ctx.axis = to_device(order, own.device), to, from_, axis
        received = torch.empty_like(own)
        dist.all_to_all_single(received, own.index_select(0, ctx.order), from_, to, group=axis.group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        returned = torch.empty_like(grad)
        dist.all_to_all_single(returned, grad.contiguous(), ctx.to, ctx.from_, group=ctx.axis.group)
        return torch.empty_like(grad).index_copy_(0, ctx.order, returned), None, None


def _send(own: Tensor, to: Sequence[int], from_: Sequence[int], axis: Axis) -> Tensor:
    received = own.new_empty(sum(from_), *own.shape[1:])
    dist.all_to_all_single(received, own.contiguous(), list(from_), list(to), group=axis.group)
    return received


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, to: tuple[int, ...], from_: tuple[int, ...], axis: Axis) -> Tensor:
        ctx.to, ctx.from_, ctx.axis = to, from_, axis
        return _send(own, to, from_, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _send(grad, ctx.from_, ctx.to, ctx.axis), None, None, None


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, places: Tensor, count: int, axis: Axis) -> Tensor:
        ctx.save_for_backward(places)
        whole = own.new_zeros(count, *own.shape[1:]).index_copy_(0, places, own)
        dist.all_reduce(whole, group=axis.group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None, None
