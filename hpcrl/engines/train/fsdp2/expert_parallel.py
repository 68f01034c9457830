"""Distribute the experts of each mixture over ranks that have different rows (expert parallelism, arXiv 2006.16668).

A rank has whole experts. It sends the states of its tokens once to each rank that has some of their chosen experts,
together with the choices and weights, and gets back the weighted sum over that rank's experts. Only these tokens are
sent, without padding to a capacity. Routers, shared experts and all other modules stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from hpcrl.engines.train.fsdp2.exchange import Axis, send_rows


class ExpertParallel:
    """Replaces the experts of every mixture by this rank's part, and their forward by an exchange of tokens.

    Attributes:
        dims: Maps the name of each parameter of experts to the dimension in which it is split, 0.
        modules: Names of the modules that have these parameters.
    """

    def __init__(self, hf: PreTrainedModel, axis: Axis):
        """`hf` is on the meta device. ValueError if its experts cannot be distributed."""
        self.axis, self.dims, self.modules = axis, dict[str, int](), list[str]()
        self._kind = hf.config.model_type
        if why := obstacle(hf):
            raise self._refusal(f"{why}; use 1")
        for name, module in list(_stacks(hf)):
            self._distribute(name, module)

    def _refusal(self, why: str) -> ValueError:
        return ValueError(f"trainer.fsdp2.expert_parallel={self.axis.size}, but {self._kind}: {why}")

    def _distribute(self, name: str, module: Any) -> None:
        if module.num_experts % self.axis.size:
            raise self._refusal(f"{self.axis.size} does not divide the {module.num_experts} experts of {name}")
        module.num_experts //= self.axis.size
        for key, whole in list(module.named_parameters(recurse=False)):
            part = nn.Parameter(whole.new_empty(module.num_experts, *whole.shape[1:]), whole.requires_grad)
            setattr(module, key, part)
            self.dims[f"{name}.{key}"] = 0
        self.modules.append(name)
        module.forward = self._with_all_experts(module.forward, module.num_experts)

    def _with_all_experts(self, forward: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
        """The forward of the experts of all ranks, of which each has `count`. It gets this rank's states [tokens,
        width], and the chosen experts and their weights [tokens, k]. Collective, also for a rank whose experts no token
        has chosen; it keeps all inputs in the graph, so that all ranks run the same exchanges in the backward pass."""
        axis = self.axis

        def run(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            token, to, from_ = _receivers(chosen // count, axis)
            received = send_rows(states.index_select(0, token), to, from_, axis)
            shares = send_rows(weights.index_select(0, token), to, from_, axis)
            own = send_rows(chosen.index_select(0, token), to, from_, axis) - axis.rank * count
            place, slot = ((own >= 0) & (own < count)).nonzero(as_tuple=True)
            if len(place):
                results = forward(received[place], own[place, slot, None], shares[place, slot, None])
            else:
                one = torch.cat([received, received.new_zeros(1, received.shape[1])])
                weight = torch.cat([shares, shares.new_zeros(1, shares.shape[1])])[:, :1]
                results = forward(one, own.new_zeros(1, 1), weight)[:0]
            returned = send_rows(_added(results, place, len(received)), from_, to, axis)
            return _added(returned, token, len(states))

        return run


def obstacle(hf: PreTrainedModel) -> str:
    """Why a model's experts cannot be distributed; empty if they can."""
    found = list(_stacks(hf))
    if not found:
        return "it has no experts that transformers keeps as one tensor per matrix"
    # transformers sets this on experts that its own parallelism can divide
    others = [name for name, module in found if not hasattr(module, "_is_expert_parallel")]
    return f"{others[0]} does not take tokens with chosen experts and weights" if others else ""


def _stacks(hf: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of the experts of every mixture: modules whose parameters all have a row per expert."""
    for name, module in hf.named_modules():
        own, count = list(module.parameters(recurse=False)), getattr(module, "num_experts", None)
        if any(p.ndim >= 3 for p in own) and all(p.shape[0] == count for p in own):
            yield name, module


def _added(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """[count, ...]: sums of the rows [n, ...] with the same place, int64 [n]."""
    return cast(Tensor, _Added.apply(rows, places, count))


class _Added(torch.autograd.Function):
    """torch's index_add without the rows, which it keeps for their shape."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(places)
        return rows.new_zeros(count, *rows.shape[1:]).index_add_(0, places, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None


@torch.no_grad()
def _receivers(owners: Tensor, axis: Axis) -> tuple[Tensor, list[int], list[int]]:
    """The tokens to send, int64 [n], by receiver; and the numbers of tokens to and from each rank. owners int64
    [tokens, k] are the ranks of the chosen experts. Waits for the device."""
    needed = torch.zeros(axis.size, len(owners), dtype=torch.bool, device=owners.device)
    needed.scatter_(0, owners.t(), True)
    to = needed.sum(1)
    from_ = torch.empty_like(to)
    dist.all_to_all_single(from_, to, group=axis.group)
    counts = torch.stack([to, from_]).tolist()
    return needed.nonzero()[:, 1], counts[0], counts[1]
