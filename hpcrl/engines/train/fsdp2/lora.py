"""Low-rank adapters for frozen linear layers and experts of a model (LoRA, arXiv 2106.09685), in peft's layout."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from hpcrl.config import LoRAConfig
from hpcrl.engines.train.fsdp2.frozen import routers
from hpcrl.engines.train.fsdp2.model_kind import HEAD
from hpcrl.models.families import family_of
from hpcrl.models.tower import part_of
from hpcrl.spec.lora import STACKED, A, B, adapted, is_adapter, layer_of, matches, unknown, unmatched

logger = logging.getLogger(__name__)

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The files of an adapter in peft's layout."""


def dropout_mask(x: Tensor, share: float, draw: Sequence[int]) -> Tensor:
    """0 for this share of x's numbers, and 1 / (1 - share) for the others, drawn from these numbers."""
    number = hashlib.blake2b(repr(tuple(draw)).encode(), digest_size=8).digest()
    generator = torch.Generator(x.device).manual_seed(int.from_bytes(number) >> 1)
    return torch.empty_like(x).bernoulli_(1 - share, generator=generator).div_(1 - share)


def drawn_matrix(rank: int, columns: int, generator: torch.Generator) -> Tensor:
    """float32 [rank, columns]: an adapter's first matrix as peft draws it, uniform within 1 / sqrt(columns)."""
    return torch.empty(rank, columns).uniform_(-(columns**-0.5), columns**-0.5, generator=generator)


class Adapters:
    """A model's adapters, which are the submodules `NAME.lora_A` and `NAME.lora_B` of each linear layer NAME, and
    submodules of a layer's experts (hpcrl.spec.lora)."""

    def __init__(self, config: LoRAConfig):
        self.config = config
        self._on = True
        self._seed = 0
        self._draw: tuple[int, ...] | None = None

    def add(self, hf: PreTrainedModel, dtype: torch.dtype, seed: int) -> PreTrainedModel:
        """Freeze the model, and add adapters of this dtype whose product is zero. ValueError as targets()."""
        hf.requires_grad_(False)
        linear, stacked = self.targets(hf)
        generator, self._seed = torch.Generator().manual_seed(seed), seed
        for number, (name, module) in enumerate(linear.items()):
            self._adapt(module, name, module.weight, dtype, generator)
            added = functools.partial(self._added, module, number, self.config.scale_of(name))
            module.added = added  # type: ignore[assignment]
            module.forward = functools.partial(_forward, module)  # type: ignore[method-assign]
        for name, experts in stacked.items():
            self._adapt_stacked(experts, name, dtype, generator)
        return hf

    def targets(self, hf: PreTrainedModel) -> tuple[dict[str, nn.Linear], dict[str, nn.Module]]:
        """The linear layers that get adapters, by name, and the experts with stacked parameters that do, by the
        parameters' names. ValueError if a target is not a linear layer of config.parts, the model lacks a part, or a
        pattern matches no layer."""
        linear, stacked = self._linear_layers(hf), self._stacked(hf)
        if (linear or not stacked or self.config.target_modules) and (
            text := unknown(self.config.target_modules, list(linear))
        ):
            raise ValueError(text)
        linear = {name: module for name, module in linear.items() if matches(name, self.config.target_modules)}
        for key in ("rank_pattern", "alpha_pattern"):
            if text := unmatched(key, getattr(self.config, key), [*linear, *stacked]):
                raise ValueError(text)
        return linear, stacked

    def _linear_layers(self, hf: PreTrainedModel) -> dict[str, nn.Linear]:
        """The linear layers of config.parts by name."""
        inside = {id(module) for module in hf.get_decoder().modules()}
        heads = id(hf.get_output_embeddings()), id(getattr(hf, HEAD, None))
        others = {*heads, *(id(part) for router in routers(hf) for part in router.modules())}
        found: dict[str, dict[str, nn.Linear]] = {"decoder": {}, "vision": {}, "merger": {}}
        for name, module in hf.named_modules():
            if isinstance(module, nn.Linear) and id(module) not in others:
                found["decoder" if id(module) in inside else part_of(name)][name] = module
        if lacking := [part for part in self.config.parts if part in found and not found[part]]:
            raise ValueError(f"trainer.lora.parts: {hf.config.model_type} has no linear layers in {', '.join(lacking)}")
        return {name: module for part in found if part in self.config.parts for name, module in found[part].items()}

    def _stacked(self, hf: PreTrainedModel) -> dict[str, nn.Module]:
        """The experts that have a stacked parameter, by its name. ValueError if there are none, but config.parts has
        experts."""
        if "experts" not in self.config.parts:
            return {}
        found = {
            f"{name}.{own}": module
            for name, module in hf.named_modules()
            for own, parameter in module.named_parameters(recurse=False)
            if parameter.ndim == 3 and type(module).__name__.endswith("Experts")
        }
        if not found:
            raise ValueError(f"trainer.lora.parts: {hf.config.model_type} has no experts; leave it out")
        return found

    def _adapt(
        self, owner: nn.Module, name: str, weight: Tensor, dtype: torch.dtype, generator: torch.Generator
    ) -> None:
        """Add an adapter, whose second matrix is zero."""
        rank, (rows, columns) = self.config.rank_of(name), weight.shape[-2:]
        if weight.ndim == 3:
            rank *= len(weight)
            rows, columns = (columns, rows) if getattr(owner, "is_transposed", False) else (rows, columns)
            owner = getattr(owner, STACKED).add_submodule(name.rpartition(".")[2])
        first = nn.Linear(columns, rank, bias=False, device="meta")
        first.weight = nn.Parameter(drawn_matrix(rank, columns, generator).to(weight.device, dtype))
        second = nn.Linear(rank, rows, bias=False, device="meta")
        second.weight = nn.Parameter(torch.zeros(rows, rank, device=weight.device, dtype=dtype))
        owner.lora_A, owner.lora_B = first, second

    def _adapt_stacked(self, experts: nn.Module, name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
        """Add an adapter to one stacked parameter of a layer's experts."""
        if not hasattr(experts, STACKED):
            experts.add_module(STACKED, _Adapted())
            forward = functools.partial(self._forward_stacked, experts, experts.forward)
            experts.forward = forward  # type: ignore[method-assign]
        self._adapt(experts, name, experts.get_parameter(name.rpartition(".")[2]), dtype, generator)
        getattr(experts, STACKED).scales[name.rpartition(".")[2]] = self.config.scale_of(name)

    def _forward_stacked(self, experts: nn.Module, forward: Callable[..., Tensor], *given: Any, **named: Any) -> Tensor:
        """The experts' own forward pass with the sums of their matrices and adapters, which hide the parameters."""
        adapters = cast(_Adapted, getattr(experts, STACKED))
        for name, scale in adapters.scales.items() if self._on else ():
            first, second = (getattr(getattr(adapters, name), part).weight for part in ("lora_A", "lora_B"))
            transposed = bool(getattr(experts, "is_transposed", False))
            experts.__dict__[name] = with_stacked(getattr(experts, name), first, second, scale, transposed)
        try:
            return forward(*given, **named)
        finally:
            for name in adapters.scales:
                experts.__dict__.pop(name, None)

    def _added(
        self, linear: nn.Linear, number: int, scale: float, x: Tensor, result: Tensor, rows: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """See with_adapter."""
        if not self._on:
            return result
        first, second = (cast(nn.Linear, part).weight.to(x.dtype) for part in (linear.lora_A, linear.lora_B))
        return result + scale * F.linear(F.linear(self._dropped(x, number), first), rows(second))

    def _dropped(self, x: Tensor, number: int) -> Tensor:
        """The input of the adapter with this number after dropout. A recomputed forward pass draws the same again."""
        if self._draw is None or not self.config.dropout:
            return x
        return x * dropout_mask(x, self.config.dropout, (self._seed, *self._draw, number))

    @contextlib.contextmanager
    def dropping(self, *draw: int) -> Iterator[None]:
        """Context with dropout, whose draws depend on these numbers, the seed and the adapter."""
        self._draw = draw
        try:
            yield
        finally:
            self._draw = None

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Context in which the model computes with only the frozen weights."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def merged(self, weights: Mapping[str, Tensor], hf: PreTrainedModel) -> dict[str, Tensor]:
        """The weights of an equivalent model without adapters, merged from base and adapter weights, in the adapters'
        dtype."""
        found = {name: weight for name, weight in weights.items() if not is_adapter(name)}
        for name in (name for name in weights if name.endswith(A)):
            own = weights[name], weights[name.removesuffix(A) + B]
            found[adapted(name)] = self.merge(hf, name, found[adapted(name)], *own)
        return found

    def merge(self, hf: PreTrainedModel, name: str, matrix: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """The sum of a matrix and its adapter, in the adapter's dtype. `name` is the name of one of the adapter's
        weights."""
        scale = self.config.scale_of(layer_of(name))
        if matrix.ndim == 2:
            return (matrix.float() + scale * second.float() @ first.float()).to(first.dtype)
        transposed = bool(getattr(hf.get_submodule(adapted(name).rpartition(".")[0]), "is_transposed", False))
        return with_stacked(matrix.float(), first, second, scale, transposed).to(first.dtype)

    def merge_rows(
        self, hf: PreTrainedModel, name: str, matrix: Tensor, first: Tensor, second: Tensor, rows: slice
    ) -> Tensor:
        """merge() for some rows of a matrix, or for some experts, and the whole adapter."""
        if not len(matrix):
            return matrix.to(first.dtype)
        if matrix.ndim == 2:
            second = second[rows]
        elif rows != slice(None):
            count = second.shape[1] // self.config.rank_of(layer_of(name))
            first = first.unflatten(0, (count, -1))[rows].flatten(0, 1)
            second = second.unflatten(1, (-1, count))[:, :, rows].flatten(1)
        return self.merge(hf, name, matrix, first, second)

    def write(self, weights: Mapping[str, Tensor], hf: PreTrainedModel, base: Path, folder: Path) -> None:
        """Write adapter_config.json and adapter_model.safetensors, which peft reads, into a new folder; only a warning
        if peft refuses adapters of a layer, and nothing for a model with a value head, which would not be in it."""
        if hasattr(hf, HEAD):
            return
        own = {name: weight.contiguous() for name, weight in weights.items() if is_adapter(name)}
        family = hf.config.get_text_config().model_type
        modules = dict.fromkeys(layer_of(name) for name in own)
        if refused := {name.rpartition(".")[2] for name in modules} & family_of(family).peft_refuses:
            text = "peft refuses adapters of %s in %s, so the export has only the merged weights"
            logger.warning(text, ", ".join(sorted(refused)), family)
            return
        folder.mkdir()
        of_experts = peft_experts(family)
        stacked = list(dict.fromkeys(adapted(name) for name in own if not adapted(name).endswith(".weight")))
        # peft takes dense layers with an expert's name for experts, unless they are named as parameters.
        parameters = {name: name for name in modules if name in stacked}
        parameters |= {f"{name}.weight": name for name in modules if name.rpartition(".")[2] in of_experts}
        # In peft, patterns refer to a parameter by its full name.
        ranks = {re.escape(name): self.config.rank_of(module) for name, module in parameters.items()}
        alphas = {re.escape(name): self.config.alpha_of(module) for name, module in parameters.items()}
        save_file(
            {f"base_model.model.{_in_peft(name, stacked)}": weight for name, weight in own.items()}, folder / WEIGHTS
        )
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(base),
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "target_modules": sorted(set(modules).difference(parameters.values())),
            "target_parameters": list(parameters) or None,
            "lora_dropout": 0.0 if parameters else self.config.dropout,  # peft has none for parameters
            "rank_pattern": ranks | self.config.rank_pattern if self.config.rank_pattern else {},
            "alpha_pattern": alphas | self.config.alpha_pattern if self.config.alpha_pattern else {},
            "bias": "none",
            "inference_mode": True,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def with_adapter(
    linear: nn.Linear, x: Tensor, result: Tensor, rows: Callable[[Tensor], Tensor] = lambda second: second
) -> Tensor:
    """The sum of a linear layer's result for x and its adapter's, if it has one. `rows` makes the used rows of B."""
    added = getattr(linear, "added", None)
    return result if added is None else cast(Tensor, added(x, result, rows))


def _forward(linear: nn.Linear, x: Tensor) -> Tensor:
    return with_adapter(linear, x, F.linear(x, linear.weight, linear.bias))


class _Adapted(nn.Module):
    """A container of the adapters of a layer's stacked parameters, which have the parameters' names."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: dict[str, float] = {}

    def add_submodule(self, name: str) -> nn.Module:
        """Add a container for one adapter; returns it."""
        self.add_module(name, nn.Module())
        return cast(nn.Module, getattr(self, name))


def with_stacked(matrices: Tensor, first: Tensor, second: Tensor, scale: float, transposed: bool) -> Tensor:
    """The sum of stacked matrices [experts, out, in], or [experts, in, out] if transposed, and scale times the product
    of each expert's adapter (STACKED), in the matrices' dtype."""
    count = len(matrices)
    down = first.to(matrices.dtype).unflatten(0, (count, -1))  # [experts, rank, in]
    up = second.to(matrices.dtype).unflatten(1, (-1, count)).permute(2, 0, 1)  # [experts, out, rank]
    factors = (down.mT, up.mT) if transposed else (up, down)
    return torch.baddbmm(matrices, *factors, alpha=scale)


def peft_experts(family: str) -> frozenset[str]:
    """Last parts of layer names that peft takes for experts in this family."""
    from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

    return family_of(_MODEL_TO_CONVERSION_PATTERN.get(family, family)).peft_experts


def _in_peft(name: str, stacked: Sequence[str]) -> str:
    """The name of an adapter's weight in peft's model, where a layer's experts are wrapped once for each of their
    adapted parameters, in the parameters' order."""
    if (whole := adapted(name)) not in stacked:
        return name
    owner, _, _ = whole.rpartition(".")
    inside = [other for other in stacked if other.startswith(f"{owner}.")]
    depth = len(inside) - 1 - inside.index(whole)
    return f"{owner}.{'base_layer.' * depth}{'lora_A' if name.endswith(A) else 'lora_B'}.weight"
