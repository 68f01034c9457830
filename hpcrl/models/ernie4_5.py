"""ERNIE 4.5, dense and with routed experts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.models.family import Family
from hpcrl.models.grouped import Mixture, gated_mlp, grouped_shape, routed_experts
from hpcrl.models.router import ExpertRouter
from hpcrl.models.shape import Decoder, ExpertFiles, ModelShape, ParameterEntry, size

FAMILY = Family(
    model_types=("ernie4_5",),
    measured_layers=True,
    decoder=Decoder(
        qkv_bias_key="use_bias",
        out_bias_key="use_bias",
        mlp_bias_key="use_bias",
        adjacent_pairs=True,
        tied=True,
        head_dim=128,
    ),
    native=True,
)


def _layers(config: Mapping[str, Any], layers: int) -> Iterator[int]:
    first, last, step = (
        config.get(key, default)
        for key, default in (("moe_layer_start_index", 1), ("moe_layer_end_index", -1), ("moe_layer_interval", 1))
    )
    last = layers - 1 if last == -1 else last
    return (layer for layer in range(layers) if first <= layer <= last and (layer + 1) % step == 0)


def _parameters(shape: ModelShape) -> Iterator[ParameterEntry]:
    yield from routed_experts(shape)
    yield f"mlp.{shape.decoder.correction_name}", (1, shape.num_experts), "whole"
    if shape.shared_size:
        yield from gated_mlp("mlp.shared_experts.", shape.hidden_size, shape.shared_size)


def _shared(config: Mapping[str, Any]) -> int:
    count = config.get("moe_num_shared_experts", 2)
    return size(config, "moe_intermediate_size", 1536) * size(config, "moe_num_shared_experts", 2) if count else 0


def _router(config: Mapping[str, Any]) -> ExpertRouter:
    return ExpertRouter(float32=True, corrected=True)


MIXTURE = Mixture(
    count=("moe_num_experts", 64),
    chosen=("moe_k", 6),
    width=("moe_intermediate_size", 1536),
    shared=_shared,
    layers=_layers,
    parameters=_parameters,
)
MOE = Family(
    model_types=("ernie4_5_moe",),
    measured_layers=True,
    decoder=Decoder(
        qkv_bias_key="use_bias",
        out_bias_key="use_bias",
        mlp_bias_key="use_bias",
        experts=True,
        correction_name="gate.moe_statics.e_score_correction_bias",
        files=ExpertFiles(correction="moe_statics.e_score_correction_bias"),
        adjacent_pairs=True,
        tied=True,
    ),
    read=functools.partial(grouped_shape, mixture=MIXTURE),
    router=_router,
    native=True,
    renamed_in_files=True,
)
