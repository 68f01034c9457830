"""Hunyuan, dense and with routed experts: query and key heads are normalised after the rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hpcrl.models.family import Family
from hpcrl.models.grouped import Mixture, all_layers, gated_mlp, grouped_shape, routed_experts
from hpcrl.models.router import ExpertRouter
from hpcrl.models.shape import Decoder, ModelShape, ParameterEntry, size

DECODER = Decoder(
    reads_bias=True,
    qk_norm=True,
    qk_norm_names=("query_layernorm", "key_layernorm"),
    qk_norm_last=True,
    rope_alpha=True,
)
FAMILY = Family(model_types=("hunyuan_v1_dense",), measured_layers=True, decoder=DECODER, native=True)


def _parameters(shape: ModelShape) -> Iterator[ParameterEntry]:
    yield from routed_experts(shape)
    yield from gated_mlp(f"mlp.{shape.decoder.shared_name}.", shape.hidden_size, shape.shared_size)


def _width(config: Mapping[str, Any]) -> int:
    return size(config, "intermediate_size", 11008)


def _router(config: Mapping[str, Any]) -> ExpertRouter:
    return ExpertRouter(float32=True)


MIXTURE = Mixture(
    count=("num_experts", 1),
    chosen=("moe_topk", 1),
    width=("intermediate_size", 11008),
    shared=_width,
    layers=all_layers,
    parameters=_parameters,
)


def _read(family: str, decoder: Decoder, config: Mapping[str, Any]) -> ModelShape:
    """moe_topk may be a list with a number per layer, which must be equal."""
    chosen = config.get("moe_topk")
    if isinstance(chosen, list) and len(set(map(str, chosen))) == 1:
        config = {**config, "moe_topk": chosen[0]}
    return grouped_shape(family, decoder, config, mixture=MIXTURE)


MOE = Family(
    model_types=("hunyuan_v1_moe",),
    measured_layers=True,
    decoder=replace(DECODER, experts=True, router_name="gate.wg", shared_name="shared_mlp"),
    read=_read,
    router=_router,
    native=True,
)
