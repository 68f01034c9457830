"""GLM-4.5 to 4.7 (arXiv 2508.06471) with routed experts, and GLM-4.7-Flash, whose attention is latent."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.models.deepseek_v3 import DECODER, latent_shape, reads_pairs
from hpcrl.models.family import Family, MegatronModel
from hpcrl.models.grouped import CorrectedLayers, Mixture, corrected_experts, first_dense, grouped_shape
from hpcrl.models.router import sigmoid_router
from hpcrl.models.shape import CannotPlanError, Decoder, ModelShape, size


def _shared(config: Mapping[str, Any]) -> int:
    return size(config, "moe_intermediate_size", 1408) * size(config, "n_shared_experts", 1)


MIXTURE = Mixture(
    count=("n_routed_experts", 128),
    chosen=("num_experts_per_tok", 8),
    width=("moe_intermediate_size", 1408),
    shared=_shared,
    layers=first_dense,
    parameters=corrected_experts,
)
LITE_SIZES = {
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "n_shared_experts": 1,
}


def _sparse_layers(config: Mapping[str, Any]) -> Iterator[int]:
    """The layers with experts according to mlp_layer_types; by default, all but the first."""
    layers, kinds = size(config, "num_hidden_layers"), config.get("mlp_layer_types")
    if kinds is None:
        kinds = ["dense"] + ["sparse"] * (layers - 1)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise CannotPlanError(f"mlp_layer_types in config.json is not a list of {layers} kinds, one for each layer")
    return (layer for layer, kind in enumerate(kinds) if kind == "sparse")


def _read_lite(family: str, decoder: Decoder, config: Mapping[str, Any]) -> ModelShape:
    layers = _sparse_layers(config)
    return latent_shape(family, reads_pairs(decoder, config), config, LITE_SIZES, layers, corrected_experts)


FAMILY = Family(
    model_types=("glm4_moe",),
    measured_layers=True,
    decoder=Decoder(qkv_bias_key="attention_bias", reads_qk_norm=True, experts=True, partly_rotated=True),
    read=functools.partial(grouped_shape, mixture=MIXTURE),
    router=sigmoid_router,
    native=True,
    megatron=MegatronModel(layers=CorrectedLayers, rope_types=("default", "linear", "llama3")),
)
LITE = Family(
    model_types=("glm4_moe_lite",),
    measured_layers=True,
    decoder=DECODER,
    read=_read_lite,
    router=functools.partial(sigmoid_router, scale=1.8),
    native=True,
)
