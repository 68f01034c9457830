"""gpt-oss (arXiv 2508.10925): attention sinks, alternating windows, and experts with biases and a clamped gate."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.models.family import Family, MegatronModel
from hpcrl.models.grouped import GroupedLayers, Mixture, all_layers, grouped_shape
from hpcrl.models.megatron_entries import Entry, EntryRows, copied, expert_name
from hpcrl.models.router import normalised_router
from hpcrl.models.shape import Decoder, ModelShape, ParameterEntry

ALPHA, LIMIT = 1.702, 7.0


def _parameters(shape: ModelShape) -> Iterator[ParameterEntry]:
    count, inner, hidden = shape.num_experts, shape.expert_size, shape.hidden_size
    yield "mlp.router.weight", (count, hidden), "whole"
    yield "mlp.router.bias", (count,), "whole"
    yield "mlp.experts.gate_up_proj", (count, hidden, 2 * inner), "expert"
    yield "mlp.experts.gate_up_proj_bias", (count, 2 * inner), "expert"
    yield "mlp.experts.down_proj", (count, inner, hidden), "expert"
    yield "mlp.experts.down_proj_bias", (count, hidden), "expert"


MIXTURE = Mixture(
    count=("num_experts", 128),
    chosen=("num_experts_per_tok", 4),
    width=("intermediate_size", 2880),
    layers=all_layers,
    parameters=_parameters,
)


class SinkLayers(GroupedLayers):
    """Experts are stacked in files too. Their matrices are transposed, and gate and up rows alternate."""

    def mixture(self, fused: bool, stacked: bool) -> Iterator[Entry]:
        """See GroupedLayers."""
        shape = self._shape
        inner, hidden = shape.expert_size, self.hidden
        yield copied("mlp.router.weight", "mlp.router.weight", (shape.num_experts, hidden))
        yield copied("mlp.router.bias", "mlp.router.bias", (shape.num_experts,))
        for expert in range(shape.num_experts):
            for which, end in (("weight", ""), ("bias", "_bias")):
                matrix = which == "weight"
                gate_up, down = f"mlp.experts.gate_up_proj{end}", f"mlp.experts.down_proj{end}"
                both = (
                    EntryRows(gate_up, 0, 0, inner, expert, step=2, transposed=matrix),
                    EntryRows(gate_up, 1, inner, inner, expert, step=2, transposed=matrix),
                )
                fc1, fc2 = (expert_name(expert, name, which, fused) for name in ("linear_fc1", "linear_fc2"))
                wide = (hidden,) if matrix else ()
                yield Entry(fc1, (2 * inner, *wide), both, "layer", expert=expert, split=0, parts=2)
                rows = (EntryRows(down, 0, 0, hidden, expert, transposed=matrix),)
                narrow = (inner,) if matrix else ()
                yield Entry(fc2, (hidden, *narrow), rows, "layer", expert=expert, split=1 if matrix else None)


def _options(model: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "softmax_type": "learnable",
        "add_bias_linear": True,
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": float(model.get("swiglu_limit", LIMIT)),
        "glu_linear_offset": 1.0,
    }


def _lacks(model: Mapping[str, Any]) -> Iterator[str]:
    """Megatron-Core has biases everywhere or nowhere, and a fixed gain of the gate's sigmoid."""
    if not model.get("attention_bias", True):
        yield "has no attention_bias=false in gpt_oss"
    if (alpha := model.get("swiglu_alpha", ALPHA)) != ALPHA:
        yield f"has no swiglu_alpha={alpha}, only {ALPHA}"


FAMILY = Family(
    model_types=("gpt_oss",),
    measured_layers=True,
    decoder=Decoder(
        reads_bias=True,
        attention_bias=True,
        sinks=True,
        experts=True,
        router_name="router",
        biased_experts=True,
        windows="by layer",
        head_dim=64,
    ),
    read=functools.partial(grouped_shape, mixture=MIXTURE),
    router=normalised_router,
    native=True,
    megatron=MegatronModel(layers=SinkLayers, options=_options, lacks=_lacks),
)
