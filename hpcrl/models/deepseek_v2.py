"""DeepSeek-V2 (arXiv 2405.04434): latent attention, shared and routed experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.models.deepseek_v3 import DEFAULTS, LatentLayers, latent_shape, scales_otherwise
from hpcrl.models.family import Family, MegatronModel
from hpcrl.models.grouped import first_dense, gated_mlp, routed_experts
from hpcrl.models.router import ExpertRouter
from hpcrl.models.shape import Decoder, ModelShape, ParameterEntry, size

SIZES = DEFAULTS | {"n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2}
METHODS = ("greedy", "group_limited_greedy")


def _parameters(shape: ModelShape) -> Iterator[ParameterEntry]:
    yield from routed_experts(shape)
    yield from gated_mlp("mlp.shared_experts.", shape.hidden_size, shape.shared_size, shape.mlp_bias)


def _read(family: str, decoder: Decoder, config: Mapping[str, Any]) -> ModelShape:
    layers = first_dense(config, size(config, "num_hidden_layers"), 0)
    return latent_shape(family, decoder, config, SIZES, layers, _parameters)


def _router(config: Mapping[str, Any]) -> ExpertRouter:
    """transformers ignores norm_topk_prob."""
    limited = config.get("topk_method") == METHODS[1]
    return ExpertRouter(
        float32=True,
        normalised=False,
        scale=float(config.get("routed_scaling_factor", 1.0)),
        groups=config.get("n_group") or 1 if limited else 1,
        chosen_groups=config.get("topk_group") or 1 if limited else 1,
    )


def _lacks(model: Mapping[str, Any]) -> Iterator[str]:
    if (method := model.get("topk_method", METHODS[0])) not in METHODS:
        yield f"has no topk_method={method}, only {', '.join(METHODS)}"
    yield from scales_otherwise(model)


FAMILY = Family(
    model_types=("deepseek_v2",),
    measured_layers=True,
    decoder=Decoder(mlp_bias_key="mlp_bias", experts=True, adjacent_pairs=True),
    read=_read,
    router=_router,
    native=True,
    megatron=MegatronModel(
        layers=LatentLayers,
        biases=("attention_bias", "mlp_bias"),
        rope_types=("default", "yarn"),
        lacks=_lacks,
        stores_own_names=True,
    ),
)
