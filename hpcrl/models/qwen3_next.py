"""Qwen3-Next: gated delta rule (arXiv 2412.06464) in most layers, gated attention in the others, experts in all."""

from collections.abc import Mapping
from typing import Any

from hpcrl.models.delta import DeltaLayers
from hpcrl.models.family import Family, MegatronModel
from hpcrl.models.router import ExpertRouter
from hpcrl.models.shape import Decoder

DECODER = Decoder(
    reads_bias=True,
    qk_norm=True,
    partly_rotated=True,
    centred_norms=True,
    gated_attention=True,
    delta_rule=True,
    shared_name="shared_expert",
    shared_gate=True,
)


def _router(config: Mapping[str, Any]) -> ExpertRouter:
    return ExpertRouter(normalised=bool(config.get("norm_topk_prob", True)))


def _options(model: Mapping[str, Any]) -> dict[str, Any]:
    return {"moe_shared_expert_gate": True, "attention_output_gate": True, "layernorm_zero_centered_gamma": True}


MEGATRON = MegatronModel(
    layers=DeltaLayers,
    biases=("attention_bias",),
    rope_types=("default", "linear", "llama3"),
    options=_options,
)
FAMILY = Family(model_types=("qwen3_next",), unlisted=DECODER, router=_router, native=True, megatron=MEGATRON)
