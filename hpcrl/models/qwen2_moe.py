"""Qwen1.5-MoE and Qwen2 (arXiv 2407.10671) with routed experts, and a shared expert behind a gate."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.models.family import Family, MegatronModel
from hpcrl.models.grouped import GroupedLayers, Mixture, gated_mlp, grouped_shape, routed_experts
from hpcrl.models.megatron_entries import Entry, copied, dense
from hpcrl.models.shape import Decoder, ModelShape, ParameterEntry, size


def _parameters(shape: ModelShape) -> Iterator[ParameterEntry]:
    yield from routed_experts(shape)
    yield from gated_mlp("mlp.shared_expert.", shape.hidden_size, shape.shared_size)
    yield "mlp.shared_expert_gate.weight", (1, shape.hidden_size), "whole"


def _shared(config: Mapping[str, Any]) -> int:
    return size(config, "shared_expert_intermediate_size", 5632)


MIXTURE = Mixture(
    count=("num_experts", 60),
    chosen=("num_experts_per_tok", 4),
    width=("moe_intermediate_size", 1408),
    shared=_shared,
    parameters=_parameters,
)


class GatedSharedLayers(GroupedLayers):
    """With a shared expert whose output is multiplied by the sigmoid of a gate."""

    def mixture(self, fused: bool, stacked: bool) -> Iterator[Entry]:
        """See GroupedLayers."""
        yield from super().mixture(fused, stacked)
        yield from dense("mlp.shared_experts.", "mlp.shared_expert.", self.hidden, self._shape.shared_size)
        yield copied("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", (1, self.hidden))


def _options(model: Mapping[str, Any]) -> dict[str, Any]:
    return {"moe_shared_expert_gate": True}


FAMILY = Family(
    model_types=("qwen2_moe",),
    measured_layers=True,
    decoder=Decoder(
        qkv_bias=True,
        qkv_bias_key="qkv_bias",
        experts=True,
        shared_name="shared_expert",
        shared_gate=True,
        windows="by layer",
        window_switch=True,
    ),
    read=functools.partial(grouped_shape, mixture=MIXTURE),
    native=True,
    megatron=MegatronModel(layers=GatedSharedLayers, options=_options),
    peft_experts=frozenset({"gate", "gate_proj", "up_proj", "down_proj"}),
)
