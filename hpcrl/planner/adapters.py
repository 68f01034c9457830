"""Trained and frozen parameters: a model's adapters (trainer.lora), and what trainer.freeze leaves untrained."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from hpcrl.config import Config, LoRAConfig, Problem
from hpcrl.models.shape import ModelShape, Parameter
from hpcrl.models.tower import PREFIX, part_of
from hpcrl.planner.memory_parts import BYTES
from hpcrl.spec import freeze
from hpcrl.spec.lora import STACKED, A, B, adapted, matches, unknown, unmatched
from hpcrl.spec.tables import GEN_ENGINES
from hpcrl.spec.weight_layout import TensorShards, keepable

HEAD, VALUE_HEAD = "lm_head.weight", "score."
EMBEDDING = re.compile(r"(embed\w*|wpe|wte)\.weight$")
"""The name of a table outside the layers."""
ROUTER = re.compile(r"\.(gate|router)\.[^.]+$")
"""In the name of a router's parameter, in a layer with experts."""


def _linear(lora: LoRAConfig, shape: ModelShape) -> list[Parameter]:
    """The matrices of the linear layers of lora.parts, without embedding, head, router and experts."""
    matrices = [p for p in shape.parameters if p.in_layers and len(p.shape) == 2]
    if shape.linear is None:
        inside = [p for p in matrices if p.layer is not None and p.split != "expert" and "decoder" in lora.parts]
        decoder = [p for p in inside if not (p.layer in shape.expert_layers and ROUTER.search(p.name))]
    else:
        decoder = [p for p in matrices if p.layer is not None and p.name in shape.linear and "decoder" in lora.parts]
    return [*decoder, *(p for p in matrices if p.layer is None and part_of(p.name) in lora.parts)]


def _stacked(lora: LoRAConfig, shape: ModelShape) -> list[Parameter]:
    """The stacked matrices of experts that get adapters."""
    return [p for p in shape.parameters if "experts" in lora.parts and p.split == "expert" and len(p.shape) == 3]


def adapters(lora: LoRAConfig | None, shape: ModelShape) -> list[Parameter]:
    """The weights of all adapters; empty without trainer.lora."""
    if lora is None:
        return []
    found = []
    for parameter in _stacked(lora, shape):
        owner, _, name = parameter.name.rpartition(".")
        experts, rows, columns = parameter.shape
        rank = experts * lora.rank_of(parameter.name)
        for suffix, sizes in ((A, (rank, columns)), (B, (rows, rank))):
            full = f"{owner}.{STACKED}.{name}{suffix}"
            found.append(Parameter(full, sizes, "whole", parameter.layer, parameter.block))
    for parameter in _linear(lora, shape):
        module, (rows, columns) = parameter.name.removesuffix(".weight"), parameter.shape
        if matches(module, lora.target_modules):
            rank = lora.rank_of(module)
            for suffix, sizes in ((A, (rank, columns)), (B, (rows, rank))):
                found.append(Parameter(module + suffix, sizes, "whole", parameter.layer, parameter.block))
    return found


def trained(config: Config, shape: ModelShape) -> ModelShape:
    """The shape with only the parameters that are trained: the adapters' and a value head's if there are any, else all
    but those of trainer.freeze."""
    if config.lora is not None:
        head = (parameter for parameter in shape.parameters if parameter.name.startswith(VALUE_HEAD))
        return replace(shape, parameters=(*adapters(config.lora, shape), *head))
    left = set(frozen(config, shape).parameters)
    return replace(shape, parameters=tuple(p for p in shape.parameters if p not in left)) if left else shape


def published(config: Config, shape: ModelShape, first: bool = False) -> ModelShape:
    """The shape with only the parameters in an update: the trained ones or, if adapters are merged, the matrices that
    have one, with what belongs to the same blocks (keepable). If the engine does not keep the others, and in a
    replica's `first` update, all of a model without adapters."""
    if not config.merges_adapters:
        return trained(config, shape)
    if first or not GEN_ENGINES[config.gen_engine].keeps_weights:
        return shape
    own = {adapted(parameter.name) for parameter in adapters(config.lora, shape)}
    kept = keepable([TensorShards(p.name, "", p.shape, (), frozen=p.name not in own) for p in shape.parameters])
    return replace(shape, parameters=tuple(p for p in shape.parameters if p.name not in kept))


def merging_bytes(config: Config, shape: ModelShape, num_shards: int = 1) -> int:
    """Bytes that a trainer rank needs to merge its shard of rows of the largest matrix with an adapter: the matrix and
    the sum in float32, the sum in the adapters' dtype, and the whole adapter. 0 if no generator gets merged weights."""
    if not config.merges_adapters or not (config.generates or config.evaluates):
        return 0
    whole = {parameter.name: parameter.shape for parameter in shape.parameters}
    adapter, most = BYTES[config.model.dtype], 0
    pairs: dict[str, int] = {}
    for parameter in adapters(config.lora, shape):
        name = adapted(parameter.name)
        pairs[name] = pairs.get(name, 0) + parameter.size * adapter
    for name, pair in pairs.items():
        rows, *rest = whole[name]
        most = max(most, -(-rows // num_shards) * math.prod(rest) * (2 * BYTES["float32"] + adapter) + pair)
    return most


def frozen(config: Config, shape: ModelShape) -> ModelShape:
    """The shape with only the parameters that are not trained: all but the adapters, or those of trainer.freeze."""
    if config.lora is not None:
        return shape
    if not config.trainer.freeze:
        return replace(shape, parameters=())
    try:
        names = freeze.frozen(config.trainer.freeze, parts(shape), shape.family)
    except ValueError:  # reported by check_frozen
        return replace(shape, parameters=())
    return replace(shape, parameters=tuple(p for p in shape.parameters if p.name in names))


def parts(shape: ModelShape) -> dict[str, str]:
    """Maps each parameter's name to its part (hpcrl.spec.freeze), `decoder` if it has none."""

    def part(parameter: Parameter) -> str:
        if parameter.name.startswith(PREFIX):
            return part_of(parameter.name)
        if parameter.layer is None:
            is_table = parameter.split == "vocabulary" or EMBEDDING.search(parameter.name)
            return "embeddings" if is_table and parameter.name != HEAD else "decoder"
        return "router" if parameter.layer in shape.expert_layers and ROUTER.search(parameter.name) else "decoder"

    return {parameter.name: part(parameter) for parameter in shape.parameters}


def check_frozen(config: Config, shape: ModelShape) -> Iterator[Problem]:
    """Report an entry of trainer.freeze that selects no parameter, and entries that select all."""
    if not (config.learns and config.trainer.freeze) or config.lora is not None:
        return
    try:
        freeze.frozen(config.trainer.freeze, parts(shape), shape.family)
    except ValueError as error:
        yield Problem(("trainer", "freeze"), str(error), (("model",),))


def saved(config: Config, shape: ModelShape) -> ModelShape:
    """The shape with only the parameters in a checkpoint."""
    return trained(config, shape) if config.lora is not None else shape


def with_adapters(config: Config, shape: ModelShape) -> ModelShape:
    """The shape with the adapters' parameters added."""
    return replace(shape, parameters=(*shape.parameters, *adapters(config.lora, shape)))


def check_targets(config: Config, shape: ModelShape) -> Iterator[Problem]:
    """Report parts that the model does not have, and targets that are not its linear layers."""
    if config.lora is None:
        return
    for part in config.lora.parts:
        only = config.lora.model_copy(update={"parts": [part]})
        if not (_stacked(only, shape) if part == "experts" else _linear(only, shape)):
            what = part if part == "experts" else f"linear layers in {part}"
            text = f"trainer.lora.parts: {shape.family} has no {what}; leave it out"
            yield Problem(("trainer", "lora", "parts"), text, (("model",),))
            return
    modules = [p.name.removesuffix(".weight") for p in _linear(config.lora, shape)]
    stacked = [p.name for p in _stacked(config.lora, shape)]
    wanted = modules or not stacked or config.lora.target_modules
    if wanted and (text := unknown(config.lora.target_modules, modules)):
        yield Problem(("trainer", "lora", "target_modules"), text, (("model",),))
        return
    modules = [name for name in modules if matches(name, config.lora.target_modules)] + stacked
    for key in ("rank_pattern", "alpha_pattern"):
        if text := unmatched(key, getattr(config.lora, key), modules):
            yield Problem(("trainer", "lora", key), text, (("model",),))
