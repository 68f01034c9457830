"""Low-rank adapters for the frozen linear layers of a model (LoRA, arXiv 2106.09685), in peft's layout."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from hpcrl.config import LoRAConfig
from hpcrl.models.families import family_of
from hpcrl.models.tower import part_of
from hpcrl.spec.lora import A, B, adapted, is_adapter, matches, unknown, unmatched

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The files of an adapter in peft's layout."""


def dropout_mask(x: Tensor, share: float, draw: Sequence[int]) -> Tensor:
    """0 for this share of x's numbers, and 1 / (1 - share) for the others, drawn from these numbers."""
    number = hashlib.blake2b(repr(tuple(draw)).encode(), digest_size=8).digest()
    generator = torch.Generator(x.device).manual_seed(int.from_bytes(number) >> 1)
    return torch.empty_like(x).bernoulli_(1 - share, generator=generator).div_(1 - share)


class Adapters:
    """A model's adapters, which are the submodules `NAME.lora_A` and `NAME.lora_B` of each linear layer NAME."""

    def __init__(self, config: LoRAConfig):
        self.config = config
        self._on = True
        self._seed = 0
        self._draw: tuple[int, ...] | None = None

    def add(self, hf: PreTrainedModel, dtype: torch.dtype, seed: int) -> PreTrainedModel:
        """Freeze the model, and add adapters of this dtype whose product is zero. ValueError if a target is not a
        linear layer of config.parts, if the model lacks a part, or if peft could not load the adapters."""
        hf.requires_grad_(False)
        linear = self._linear_layers(hf)
        if text := unknown(self.config.target_modules, list(linear)):
            raise ValueError(text)
        self._check_readable(hf.config.get_text_config().model_type, list(linear))
        generator, self._seed = torch.Generator().manual_seed(seed), seed
        linear = {name: module for name, module in linear.items() if matches(name, self.config.target_modules)}
        for key in ("rank_pattern", "alpha_pattern"):
            if text := unmatched(key, getattr(self.config, key), list(linear)):
                raise ValueError(text)
        for number, (name, module) in enumerate(linear.items()):
            self._add(name, number, module, dtype, generator)
        return hf

    def _linear_layers(self, hf: PreTrainedModel) -> dict[str, nn.Linear]:
        """The linear layers of config.parts by name."""
        inside, head = {id(module) for module in hf.get_decoder().modules()}, hf.get_output_embeddings()
        found: dict[str, dict[str, nn.Linear]] = {"decoder": {}, "vision": {}, "merger": {}}
        for name, module in hf.named_modules():
            if isinstance(module, nn.Linear) and module is not head:
                found["decoder" if id(module) in inside else part_of(name)][name] = module
        if lacking := [part for part in self.config.parts if not found[part]]:
            raise ValueError(f"trainer.lora.parts: {hf.config.model_type} has no linear layers in {', '.join(lacking)}")
        return {name: module for part in found if part in self.config.parts for name, module in found[part].items()}

    def _check_readable(self, family: str, modules: list[str]) -> None:
        """ValueError if peft would not load these adapters. In families whose experts are stacked in memory, peft
        treats every layer with an expert's name as experts, even dense layers."""
        from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

        names = {module.rpartition(".")[2] for module in modules if matches(module, self.config.target_modules)}
        stacked_as = _MODEL_TO_CONVERSION_PATTERN.get(family, family)
        if taken := sorted(names & family_of(stacked_as).peft_experts):
            others = ",".join(sorted(names - set(taken))) or "layers of the attention"
            raise ValueError(
                f"trainer.lora.target_modules: {', '.join(taken)} of {family} are dense layers that peft treats as "
                f"experts, so it would not load the adapters; use [{others}]"
            )

    def _add(self, name: str, number: int, linear: nn.Linear, dtype: torch.dtype, generator: torch.Generator) -> None:
        """Add an adapter with peft's initialisation: A is uniform within 1 / sqrt(in), B is zero."""
        rank, device = self.config.rank_of(name), linear.weight.device
        first = nn.Linear(linear.in_features, rank, bias=False, device="meta")
        bound = linear.in_features**-0.5
        drawn = torch.empty(rank, linear.in_features).uniform_(-bound, bound, generator=generator)
        first.weight = nn.Parameter(drawn.to(device, dtype))
        second = nn.Linear(rank, linear.out_features, bias=False, device="meta")
        second.weight = nn.Parameter(torch.zeros(linear.out_features, rank, device=device, dtype=dtype))
        linear.lora_A, linear.lora_B = first, second
        scale = self.config.scale_of(name)
        linear.forward = functools.partial(self._forward, linear, number, scale)  # type: ignore[method-assign]

    def _forward(self, linear: nn.Linear, number: int, scale: float, x: Tensor) -> Tensor:
        result = F.linear(x, linear.weight, linear.bias)
        if not self._on:
            return result
        first, second = (cast(nn.Linear, part).weight.to(x.dtype) for part in (linear.lora_A, linear.lora_B))
        return result + scale * F.linear(F.linear(self._dropped(x, number), first), second)

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

    def merged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of an equivalent model without adapters, merged from base and adapter weights, in the adapters'
        dtype."""
        found = {name: weight for name, weight in weights.items() if not is_adapter(name)}
        for name in (name for name in weights if name.endswith(A)):
            first, second, matrix = weights[name], weights[name.removesuffix(A) + B], found[adapted(name)]
            product = second.float() @ first.float()
            scale = self.config.scale_of(name.removesuffix(A))
            found[adapted(name)] = (matrix.float() + scale * product).to(first.dtype)
        return found

    def write(self, weights: Mapping[str, Tensor], base: Path, folder: Path) -> None:
        """Write adapter_config.json and adapter_model.safetensors, which peft reads, into a new folder."""
        own = {name: weight.contiguous() for name, weight in weights.items() if is_adapter(name)}
        folder.mkdir()
        save_file({f"base_model.model.{name}": weight for name, weight in own.items()}, folder / WEIGHTS)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(base),
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "target_modules": sorted({adapted(name).removesuffix(".weight") for name in own}),
            "lora_dropout": self.config.dropout,
            "rank_pattern": self.config.rank_pattern,
            "alpha_pattern": self.config.alpha_pattern,
            "bias": "none",
            "inference_mode": True,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
