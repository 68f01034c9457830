"""Split matrices over ranks, by transformers' tensor-parallel plan for a model (`tp_plan`).

The plan defines which matrices are split by rows (colwise) and which, after them, by columns (rowwise). Outside these
pairs, each rank has its own tokens (sequence parallelism, arXiv 2205.05198): tokens are gathered before a pair, and its
results are summed and scattered. So the gradient of every parameter that is not split is a sum over ranks. This also
holds for norms within a pair (replicated_with_grad_allreduce), for which transformers' own hooks would sum the
gradients of earlier micro-batches again.

Experts are distributed, although the plan splits them: a rank has full experts. Every rank has the full embedding and
output head, which it applies to its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hpcrl.engines.train.fsdp2.exchange import Axis, gather_tokens, sum_tokens
from hpcrl.engines.train.fsdp2.row_mixers import mixers_of

EXPERTS = "moe_tp_experts"
WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise"}
_LAYERS = "model.language_model.layers.*"
ADDED: dict[str, dict[str, str]] = {
    "qwen3_vl": {f"{_LAYERS}.self_attn.{name}_proj": "colwise" for name in "qkv"}
    | {f"{_LAYERS}.self_attn.o_proj": "rowwise", f"{_LAYERS}.mlp.down_proj": "rowwise"}
    | {f"{_LAYERS}.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
    "qwen3_vl_moe": {f"{_LAYERS}.mlp.experts": EXPERTS},
}
"""Entries of the plans of Qwen3 and Qwen3-MoE that transformers' plans for these model_types lack."""


class TensorParallel:
    """Replaces every matrix of a plan by this rank's part, and adds the necessary exchanges to its modules.

    Attributes:
        dims: Maps a parameter's name to the dimension in which it is split.
        tokens_split: Whether a forward pass has only this rank's tokens, as in training. In the packing probe, which
            has no gradients, every rank has all tokens.
    """

    def __init__(self, hf: PreTrainedModel, axis: Axis):
        """`hf` is on the meta device. ValueError if the plan cannot be applied."""
        self.axis, self.tokens_split, self.dims = axis, False, dict[str, int]()
        self._kind = hf.config.model_type
        modules = dict(hf.named_modules())
        owners: dict[str, set[str]] = {"colwise": set(), "rowwise": set()}
        for name, style in self._styles(hf):
            if style == EXPERTS:
                self._distribute_experts(name, modules[name])
            else:
                self._split(name, modules[name], style)
                owners[style].add(name.rpartition(".")[0])
        if not self.dims:
            raise self._refusal("transformers has no plan for it")
        if alone := owners["colwise"] ^ owners["rowwise"]:
            raise self._refusal(f"the matrices of {min(alone)} are not split in pairs by transformers' plan")
        for name in owners["colwise"]:
            module: Any = modules[name]
            module.forward = self._with_all_tokens(module.forward)

    def _refusal(self, why: str) -> ValueError:
        return ValueError(f"trainer.fsdp2.tensor_parallel={self.axis.size}: {self._kind} cannot be split: {why}")

    def _styles(self, hf: PreTrainedModel) -> Iterator[tuple[str, str]]:
        """(module name, style) of the modules to change."""
        plan = hf.tp_plan | ADDED.get(self._kind, {})
        experts = tuple(f"{key}." for key, style in plan.items() if style == EXPERTS)
        head = next((name for name, module in hf.named_modules() if module is hf.get_output_embeddings()), None)
        mixers = tuple(f"{name}." for name in mixers_of(hf))
        for name, _ in hf.named_modules():
            key = re.sub(r"\.\d+(?=\.|$)", ".*", name)
            style = plan.get(key)
            if style is None or style in WHOLE or name == head or key.startswith(experts) or name.startswith(mixers):
                continue
            if style not in ("colwise", "rowwise", EXPERTS):
                raise self._refusal(f"{key} is {style} in transformers' plan, which is not supported")
            yield name, style

    def _split(self, name: str, module: Any, style: str) -> None:
        if type(module) is not nn.Linear:
            raise self._refusal(f"{name} is not a matrix")
        self._shrink(name, module, "weight", 0 if style == "colwise" else 1)
        if style == "colwise":
            if module.bias is not None:
                self._shrink(name, module, "bias", 0)
        else:
            module.forward = self._summed(module)  # type: ignore[method-assign, assignment]

    def _shrink(self, owner: str, module: nn.Module, key: str, dim: int) -> None:
        whole = module.get_parameter(key)
        shape = list(whole.shape)
        if shape[dim] % self.axis.size:
            raise self._refusal(f"{owner}.{key} is {shape}, and {self.axis.size} does not divide {shape[dim]}")
        shape[dim] //= self.axis.size
        setattr(module, key, nn.Parameter(whole.new_empty(shape), requires_grad=whole.requires_grad))
        self.dims[f"{owner}.{key}"] = dim

    def _distribute_experts(self, name: str, module: Any) -> None:
        if not hasattr(module, "num_experts"):
            raise self._refusal(f"{name} has another form of experts than Qwen3-MoE")
        for key, _ in list(module.named_parameters(recurse=False)):
            self._shrink(name, module, key, 0)
        module.num_experts //= self.axis.size
        module.forward = self._with_own_experts(module.forward, module.num_experts)

    # ---- forwards

    def _gathered(self, own: Tensor) -> Tensor:
        """All tokens [..., tokens, width] from all ranks' tokens, for a batch of one."""
        if not self.tokens_split:
            return own
        return gather_tokens(own.flatten(0, -2), self.axis).unflatten(0, (*own.shape[:-2], -1))

    def _sum(self, parts: Tensor) -> Tensor:
        """This rank's tokens [..., tokens, width] of the sum over ranks, for a batch of one."""
        if self.tokens_split:
            return sum_tokens(parts.flatten(0, -2), self.axis).unflatten(0, (*parts.shape[:-2], -1))
        dist.all_reduce(parts, group=self.axis.group)
        return parts

    def _with_all_tokens(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a module that has a pair of split matrices. Its first input holds the tokens."""

        def run(*inputs: Any, **named: Any) -> Any:
            first = inputs[0] if inputs else named.pop("hidden_states")
            return forward(self._gathered(first), *inputs[1:], **named)

        return run

    def _summed(self, module: nn.Linear) -> Callable[[Tensor], Tensor]:
        """The forward of a matrix that is split by columns."""

        def run(inputs: Tensor) -> Tensor:
            total = self._sum(F.linear(inputs, module.weight))
            return total if module.bias is None else total + module.bias

        return run

    def _with_own_experts(self, forward: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
        """The forward of experts on a rank that has `count` of them. It gets states [tokens, width], and the chosen
        experts and their weights [tokens, k]."""
        first = self.axis.rank * count

        def run(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            states, chosen, weights = self._gathered(states), self._gathered(chosen) - first, self._gathered(weights)
            token, slot = ((chosen >= 0) & (chosen < count)).nonzero(as_tuple=True)
            if len(token):
                results = forward(states[token], chosen[token, slot, None], weights[token, slot, None])
            else:  # keep all inputs in the backward pass, whose exchanges need all ranks
                results, token = 0.0 * forward(states[:1], chosen.new_zeros(1, 1), weights[:1, :1]), chosen.new_zeros(1)
            return self._sum(torch.zeros_like(states).index_add(0, token, results))

        return run
