"""A model's adapters (trainer.lora): their shapes, and the weights that a publish sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hpcrl.config import Config, LoRAConfig, Problem
from hpcrl.models.shape import ModelShape, Parameter
from hpcrl.spec.lora import A, B, matches, unknown


def _linear(shape: ModelShape) -> list[Parameter]:
    """The matrices of the decoder's linear layers, without embedding, head, router and experts."""
    return [p for p in shape.parameters if p.layer is not None and len(p.shape) == 2 and p.split != "whole"]


def adapters(lora: LoRAConfig | None, shape: ModelShape) -> list[Parameter]:
    """The weights of all adapters; empty without trainer.lora."""
    if lora is None:
        return []
    found = []
    for parameter in _linear(shape):
        module, (rows, columns) = parameter.name.removesuffix(".weight"), parameter.shape
        if matches(module, lora.target_modules):
            for suffix, sizes in ((A, (lora.rank, columns)), (B, (rows, lora.rank))):
                found.append(Parameter(module + suffix, sizes, "whole", parameter.layer))
    return found


def trained(config: Config, shape: ModelShape) -> ModelShape:
    """The shape with only the parameters that are trained and published: the adapters' if there are any, else all."""
    return replace(shape, parameters=tuple(adapters(config.lora, shape))) if config.lora is not None else shape


def with_adapters(config: Config, shape: ModelShape) -> ModelShape:
    """The shape with the adapters' parameters added."""
    return replace(shape, parameters=(*shape.parameters, *adapters(config.lora, shape)))


def check_targets(config: Config, shape: ModelShape) -> Iterator[Problem]:
    """Report targets that are not linear layers of the model."""
    if config.lora is None:
        return
    modules = [p.name.removesuffix(".weight") for p in _linear(shape)]
    if text := unknown(config.lora.target_modules, modules):
        yield Problem(("trainer", "lora", "target_modules"), text, (("model",),))
