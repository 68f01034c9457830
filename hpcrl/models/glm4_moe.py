"""GLM-4.5 to 4.7 (arXiv 2508.06471) with routed experts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from hpcrl.models.family import Family, MegatronModel
from hpcrl.models.grouped import CorrectedLayers, Mixture, corrected_experts, first_dense, grouped_shape
from hpcrl.models.router import sigmoid_router
from hpcrl.models.shape import Decoder, size


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
FAMILY = Family(
    model_types=("glm4_moe",),
    measured_layers=True,
    decoder=Decoder(qkv_bias_key="attention_bias", reads_qk_norm=True, experts=True, partly_rotated=True),
    read=functools.partial(grouped_shape, mixture=MIXTURE),
    router=sigmoid_router,
    native=True,
    megatron=MegatronModel(layers=CorrectedLayers, rope_types=("default", "linear", "llama3")),
)
