"""Split matrices over ranks, by transformers' tensor-parallel plan for a model (`tp_plan`) and usual names.

The plan defines which matrices are split by rows (colwise) and which, after them, by columns (rowwise). Outside these
pairs, each rank has its own tokens (sequence parallelism, arXiv 2205.05198): tokens are gathered before a pair, and its
results are summed and scattered. So the gradient of every parameter that is not split is a sum over ranks. This also
holds for norms within a pair (replicated_with_grad_allreduce), for which transformers' own hooks would sum the
gradients of earlier micro-batches again.

A fused matrix (qkv_proj, gate_up_proj) is stored like any other, by consecutive rows, as exports and checkpoints need
it. Before each use, ranks exchange rows, so each has its share of every matrix in it. A norm over all heads (OLMo 2)
exchanges its sums of squares.

Experts are distributed, although the plan splits them: a rank has full experts. Every rank has the full embedding and
output head, which it applies to its tokens.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hpcrl.engines.train.fsdp2.exchange import Axis, gather_tokens, share_of_parts, sum_tokens
from hpcrl.engines.train.fsdp2.lora import with_adapter
from hpcrl.engines.train.fsdp2.model_kind import decoder_of
from hpcrl.engines.train.fsdp2.row_mixers import mixers_of

EXPERTS = "moe_tp_experts"
STYLES = {
    **dict.fromkeys(("colwise", "colwise_gather_output"), "colwise"),
    **dict.fromkeys(("rowwise", "rowwise_split_input"), "rowwise"),
    EXPERTS: EXPERTS,
}
"""transformers' styles, and what is done. transformers gathers the results of some matrices, where it splits neither
norms over all heads nor the parts of fused matrices."""
WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise", "mla_kv_a_proj", "all_reduce"}
ATTENTION = ("self_attn", "mixer")
FEED_FORWARD = ("mlp", "feed_forward", "mixer", "shared_expert", "shared_experts", "shared_mlp")
MIXTURES = ("mlp", "feed_forward", "mixer", "block_sparse_moe")
"""Names of modules that have attention's matrices, feed-forward matrices, or experts. Nemotron-H calls all of them, and
recurrent mixers, `mixer`."""
FUSED = ("gate_up_proj", "input_linear")
"""Names of matrices that have a gate's rows and then as many others."""
USUAL: dict[str, str] = {
    **{
        f"{at}.{name}_proj": "colwise"
        for at in ATTENTION
        for name in ("q", "k", "v", "qkv", "q_b", "kv_b", "gate", "g")
    },
    **{f"{at}.{name}": "rowwise" for at in ATTENTION for name in ("o_proj", "out_proj")},
    **{f"{at}.{name}": "colwise" for at in FEED_FORWARD for name in ("gate_proj", "up_proj", "w1", "w3", *FUSED)},
    **{f"{at}.{name}": "rowwise" for at in FEED_FORWARD for name in ("down_proj", "w2", "output_linear")},
    **{f"{at}.experts": EXPERTS for at in MIXTURES},
    "self_attn.sinks": "colwise",
}
"""For matrices with these names, after that of their module, which transformers' plan for a family lacks."""
HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")
"""A module's or its config's numbers of heads, of which a rank has a part."""


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
        for name, style in list(self._styles(hf)):
            owner, _, own = name.rpartition(".")
            if style == EXPERTS:
                self._distribute_experts(name, modules[name])
                continue
            owners[style].add(owner)
            if name in modules:
                self._split(name, modules[name], style, modules[owner])
            else:  # a number for each head
                self._shrink(owner, modules[owner], own, 0)
        if not self.dims:
            raise self._refusal(self._why_whole(hf))
        if alone := owners["colwise"] ^ owners["rowwise"]:
            raise self._refusal(f"the matrices of {min(alone)} are not split in pairs by transformers' plan")
        for name in owners["colwise"]:
            module: Any = modules[name]
            self._share_heads(module)
            module.forward = self._with_all_tokens(module.forward)

    def _refusal(self, why: str) -> ValueError:
        return ValueError(f"trainer.fsdp2.tensor_parallel={self.axis.size}: {self._kind} cannot be split: {why}")

    def _why_whole(self, hf: PreTrainedModel) -> str:
        """Why no matrix is split."""
        inside = {module for mixer in mixers_of(hf).values() for module in mixer.modules()}
        if inside and all(module in inside for module in decoder_of(hf).modules() if isinstance(module, nn.Linear)):
            return "all of its matrices are in recurrent mixers, which stay whole; use context_parallel"
        return "transformers has no plan for it, and its matrices have other names than usual"

    def _styles(self, hf: PreTrainedModel) -> Iterator[tuple[str, str]]:
        """(name, what to do) of the decoder's modules and vectors to change."""
        plan, decoder = hf.tp_plan, decoder_of(hf)
        prefix = next(f"{name}." for name, module in hf.named_modules() if module is decoder)
        names = [prefix + name for name, _ in decoder.named_modules()]
        vectors = [prefix + name for name, some in decoder.named_parameters() if some.ndim == 1]
        inside = [f"{name}." for name in mixers_of(hf)]  # modules that are not split in themselves
        for name in names + vectors:
            key = re.sub(r"\.\d+(?=\.|$)", ".*", name)
            in_layer = key.startswith(f"{prefix}layers.*.")
            style = plan.get(key) or (USUAL.get(".".join(key.split(".")[-2:])) if in_layer else None)
            if style is None or style in WHOLE or name.startswith(tuple(inside)):
                continue
            if style not in STYLES:
                raise self._refusal(f"{key} is {style} in transformers' plan, which is not supported")
            if style == EXPERTS:
                inside.append(f"{name}.")
            yield name, STYLES[style]

    def _split(self, name: str, module: Any, style: str, owner: nn.Module) -> None:
        """Split a matrix of `owner` and, after it, a norm over all heads."""
        if type(module) is not nn.Linear:
            raise self._refusal(f"{name} is not a matrix")
        parts, width = self._parts(name, module, owner), module.out_features
        self._shrink(name, module, "weight", 0 if style == "colwise" else 1)
        if hasattr(module, "added"):  # an adapter's B is split by rows, or its A by columns
            factor = "lora_B" if style == "colwise" else "lora_A"
            self._shrink(f"{name}.{factor}", getattr(module, factor), "weight", 0 if style == "colwise" else 1)
        if style == "rowwise":
            module.forward = self._summed(module)  # type: ignore[method-assign, assignment]
            return
        if module.bias is not None:
            self._shrink(name, module, "bias", 0)
        if len(parts) > 1:
            if any(part % self.axis.size for part in parts):
                raise self._refusal(f"{self.axis.size} does not divide the parts {parts} of {name}")
            module.forward = self._of_parts(module, parts)  # type: ignore[method-assign, assignment]
        norm: Any = getattr(owner, f"{name.rpartition('.')[2].removesuffix('_proj')}_norm", None)
        weight = getattr(norm, "weight", None)
        if weight is not None and weight.numel() == width:
            self._shrink(f"{name.removesuffix('_proj')}_norm", norm, "weight", 0)
            if weight.ndim == 1:
                norm.forward = self._over_all_heads(name, norm)

    def _parts(self, name: str, module: nn.Linear, owner: Any) -> list[int]:
        """Rows of each of the matrices that transformers fuses into this one."""
        if name.endswith(tuple(f".{fused}" for fused in FUSED)):
            return [module.out_features // 2] * 2
        if not name.endswith(".qkv_proj"):
            return [module.out_features]
        if not hasattr(owner, "config") or not hasattr(owner, "head_dim"):
            raise self._refusal(f"the parts of {name} are not known")
        keys = owner.config.num_key_value_heads * owner.head_dim
        return [module.out_features - 2 * keys, keys, keys]

    def _share_heads(self, module: Any) -> None:
        """A rank's numbers of heads, for modules whose forward uses them."""
        for name in HEADS:
            if isinstance(count := getattr(module, name, None), int) and count % self.axis.size == 0:
                setattr(module, name, count // self.axis.size)
        if hasattr(module, "config"):
            module.config = ConfigOfRank(module.config, self.axis.size)

    def _shrink(self, owner: str, module: nn.Module, key: str, dim: int) -> None:
        whole = module.get_parameter(key)
        shape = list(whole.shape)
        if shape[dim] % self.axis.size:
            raise self._refusal(f"{owner}.{key} is {shape}, and {self.axis.size} does not divide {shape[dim]}")
        shape[dim] //= self.axis.size
        setattr(module, key, nn.Parameter(whole.new_empty(shape), requires_grad=whole.requires_grad))
        self.dims[f"{owner}.{key}"] = dim

    def _distribute_experts(self, name: str, module: Any) -> None:
        given = inspect.signature(module.forward).parameters.values()
        count = sum(some.kind is some.POSITIONAL_OR_KEYWORD for some in given)
        if not hasattr(module, "num_experts") or count != 3:
            return  # of another form than Qwen3-MoE's; every rank has all of them
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
            total = self._sum(with_adapter(module, inputs, F.linear(inputs, module.weight)))
            return total if module.bias is None else total + module.bias

        return run

    def _of_parts(self, module: nn.Linear, parts: Sequence[int]) -> Callable[[Tensor], Tensor]:
        """The forward of a fused matrix, of which a rank holds consecutive rows, as of every other, and uses rows of
        each part."""

        def run(inputs: Tensor) -> Tensor:
            bias = None if module.bias is None else share_of_parts(module.bias, parts, self.axis)
            result = F.linear(inputs, share_of_parts(module.weight, parts, self.axis), bias)
            return with_adapter(module, inputs, result, lambda second: share_of_parts(second, parts, self.axis))

        return run

    def _over_all_heads(self, name: str, norm: Any) -> Callable[[Tensor], Tensor]:
        """The forward of a root-mean-square norm over a width of which a rank has a part."""
        forward, eps = norm.forward, getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if eps is None:
            raise self._refusal(f"the norm after {name} is over all heads and has no epsilon")

        def run(own: Tensor) -> Tensor:
            square = own.float().square().mean(-1, keepdim=True)
            of_all = self._gathered(self._sum(square / self.axis.size))
            ratio = ((square + eps) / (of_all + eps)).sqrt()
            return (forward(own) * ratio).to(own.dtype)

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


class ConfigOfRank:
    """A transformers config with a rank's numbers of heads."""

    def __init__(self, config: Any, size: int):
        self._config, self._size = config, size

    def __getattr__(self, name: str) -> Any:
        value = getattr(object.__getattribute__(self, "_config"), name)
        return value // self._size if name in HEADS and isinstance(value, int) else value
