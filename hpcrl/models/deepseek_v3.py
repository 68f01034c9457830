"""DeepSeek-V3 (arXiv 2412.19437) and models of its architecture, such as Moonlight and Kimi K2: latent attention,
shared and routed experts, multi-token prediction layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hpcrl.models.family import Family, MegatronModel
from hpcrl.models.grouped import corrected_experts, decoder_parameters, first_dense, gated_mlp, norms
from hpcrl.models.megatron_entries import Entry, LayerSpec, copied, dense, routed
from hpcrl.models.rope import rope_type, ropes
from hpcrl.models.router import sigmoid_router
from hpcrl.models.shape import Decoder, Latent, ModelShape, ParameterEntry, size

DEFAULTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
}
FIRST_DENSE = 3
DECODER = Decoder(experts=True, adjacent_pairs=True)
CORRECTION = "mlp.gate.e_score_correction_bias"


def latent_shape(
    family: str,
    decoder: Decoder,
    config: Mapping[str, Any],
    defaults: Mapping[str, int],
    expert_layers: Iterable[int],
    mixture: Callable[[ModelShape], Iterator[ParameterEntry]],
) -> ModelShape:
    """The shape of a decoder with latent attention.

    Args:
        defaults: transformers' defaults for sizes.
        expert_layers: The layers with experts.
        mixture: The parameters of a layer's experts.
    """
    sizes = {key: size(config, key, default) for key, default in defaults.items()}
    latent = Latent(
        None if config.get("q_lora_rank", 0) is None else sizes["q_lora_rank"],
        sizes["kv_lora_rank"],
        sizes["qk_nope_head_dim"],
        sizes["qk_rope_head_dim"],
        sizes["v_head_dim"],
    )
    layers, heads = size(config, "num_hidden_layers"), size(config, "num_attention_heads")
    shape = ModelShape(
        family=family,
        decoder=decoder,
        hidden_size=size(config, "hidden_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=latent.nope + latent.rope,
        intermediate_size=size(config, "intermediate_size"),
        vocab_size=size(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(config.get("attention_bias", False)),
        out_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get(decoder.mlp_bias_key, False)),
        num_experts=sizes["n_routed_experts"],
        experts_per_token=sizes["num_experts_per_tok"],
        expert_size=sizes["moe_intermediate_size"],
        expert_layers=frozenset(expert_layers),
        latent=latent,
        shared_size=sizes["moe_intermediate_size"] * sizes["n_shared_experts"],
    )
    of_experts = tuple(mixture(shape))
    of_mlp = tuple(gated_mlp("mlp.", shape.hidden_size, shape.intermediate_size, shape.mlp_bias))
    inside = [
        [*_attention(shape, latent), *(of_experts if layer in shape.expert_layers else of_mlp), *norms(shape)]
        for layer in range(layers)
    ]
    shape = replace(shape, parameters=tuple(decoder_parameters(shape, inside)))
    return shape.with_linear("_proj.weight", "_proj_with_mqa.weight")


def read_shape(family: str, decoder: Decoder, config: Mapping[str, Any]) -> ModelShape:
    """The shape of transformers' model, which has no multi-token prediction layers. The router's bias per expert counts
    as a parameter, because checkpoints contain it and generators need it."""
    layers = first_dense(config, size(config, "num_hidden_layers"), FIRST_DENSE)
    return latent_shape(family, reads_pairs(decoder, config), config, DEFAULTS, layers, corrected_experts)


def reads_pairs(decoder: Decoder, config: Mapping[str, Any]) -> Decoder:
    """The decoder with the pairs of dimensions that rope_interleave defines."""
    return replace(decoder, adjacent_pairs=bool(config.get("rope_interleave", True)))


def _attention(shape: ModelShape, latent: Latent) -> Iterator[ParameterEntry]:
    """Latent attention. Every tensor-parallel rank holds the full matrices that compute latents."""
    hidden, at, query = shape.hidden_size, "self_attn.", (shape.query_size, latent.query_rank or shape.hidden_size)
    if latent.query_rank is None:
        yield at + "q_proj.weight", query, "column"
    else:
        yield at + "q_a_proj.weight", (latent.query_rank, hidden), "whole"
        if shape.qkv_bias:
            yield at + "q_a_proj.bias", (latent.query_rank,), "whole"
        yield at + "q_a_layernorm.weight", (latent.query_rank,), "whole"
        yield at + "q_b_proj.weight", query, "column"
    compressed = latent.rank + latent.rope
    yield at + "kv_a_proj_with_mqa.weight", (compressed, hidden), "whole"
    if shape.qkv_bias:
        yield at + "kv_a_proj_with_mqa.bias", (compressed,), "whole"
    yield at + "kv_a_layernorm.weight", (latent.rank,), "whole"
    yield at + "kv_b_proj.weight", (shape.num_heads * (latent.nope + latent.value), latent.rank), "column"
    yield at + "o_proj.weight", (hidden, shape.num_heads * latent.value), "row"
    if shape.out_bias:
        yield at + "o_proj.bias", (hidden,), "whole"


class LatentLayers:
    """The layers in Megatron-Core (MegatronLayers), without multi-token prediction layers, as in transformers."""

    def __init__(self, config: Mapping[str, Any], shape: ModelShape):
        self._shape = shape
        self.hidden, self.vocabulary = shape.hidden_size, shape.vocab_size
        self.num_layers, self.tied = shape.num_layers, shape.tied
        for key, given in (("attention_bias", shape.qkv_bias), ("mlp_bias", shape.mlp_bias)):
            if given:
                raise ValueError(f"config.json: {key}=true of a {shape.family} model has no table of Megatron's names")

    def attention(self, layer: int, layers: LayerSpec) -> Iterator[Entry]:
        at, hf, fused, latent = "self_attention.", "self_attn.", layers == "fused", self._shape.latent
        assert latent is not None
        down, heads = 0 if layers == "local" else None, self._shape.num_heads
        yield copied("input_layernorm.weight", "input_layernorm.weight", (self.hidden,))
        if latent.query_rank is None:
            query = (self._shape.query_size, self.hidden)
            yield copied(at + "linear_q_proj.weight", hf + "q_proj.weight", query, split=0)
        else:
            narrow = latent.query_rank
            norm = at + ("linear_q_up_proj.layer_norm_weight" if fused else "q_layernorm.weight")
            yield copied(at + "linear_q_down_proj.weight", hf + "q_a_proj.weight", (narrow, self.hidden), split=down)
            yield copied(norm, hf + "q_a_layernorm.weight", (narrow,))
            query = (self._shape.query_size, narrow)
            yield copied(at + "linear_q_up_proj.weight", hf + "q_b_proj.weight", query, split=0)
        compressed = (latent.rank + latent.rope, self.hidden)
        norm = at + ("linear_kv_up_proj.layer_norm_weight" if fused else "kv_layernorm.weight")
        yield copied(at + "linear_kv_down_proj.weight", hf + "kv_a_proj_with_mqa.weight", compressed, split=down)
        yield copied(norm, hf + "kv_a_layernorm.weight", (latent.rank,))
        both = (heads * (latent.nope + latent.value), latent.rank)
        yield copied(at + "linear_kv_up_proj.weight", hf + "kv_b_proj.weight", both, split=0)
        out = (self.hidden, heads * latent.value)
        yield copied(at + "linear_proj.weight", hf + "o_proj.weight", out, split=1)

    def mlp(self, layer: int, fused: bool, stacked: bool) -> Iterator[Entry]:
        shape, mixed = self._shape, layer in self._shape.expert_layers
        norm = "mlp.linear_fc1.layer_norm_weight" if fused and not mixed else "pre_mlp_layernorm.weight"
        yield copied(norm, "post_attention_layernorm.weight", (self.hidden,))
        if not mixed:
            yield from dense("mlp.", "mlp.", self.hidden, shape.intermediate_size)
            return
        count = shape.num_experts
        yield from routed(count, self.hidden, shape.expert_size, fused, stacked)
        if any(parameter.name.endswith(CORRECTION) for parameter in shape.of_layer(layer)):
            yield copied("mlp.router.expert_bias", CORRECTION, (count,))
        yield from dense("mlp.shared_experts.", "mlp.shared_experts.", self.hidden, shape.shared_size)


def scales_otherwise(model: Mapping[str, Any]) -> Iterator[str]:
    """Kinds of yarn with which Megatron-Core's latent attention would scale something else than transformers'."""
    for rope in (rope for rope in ropes(model) if rope_type(rope) == "yarn"):
        both = rope.get("mscale"), rope.get("mscale_all_dim")
        if not both[0] or both[0] != both[1] or rope.get("attention_factor"):
            yield f"has yarn with mscale equal to mscale_all_dim only, not with {both[0]} and {both[1]}"


def _lacks(model: Mapping[str, Any]) -> Iterator[str]:
    """Features with which Megatron-Core's layers would compute something different from transformers' DeepseekV3."""
    rotated = model.get("qk_rope_head_dim", 64)
    if (width := model.get("head_dim", rotated)) != rotated:
        yield f"rotates the qk_rope_head_dim numbers of a head, {rotated}, not head_dim={width} of them"
    if not model.get("rope_interleave", True):
        yield "has no rope_interleave=false"
    yield from scales_otherwise(model)


FAMILY = Family(
    model_types=("deepseek_v3",),
    measured_layers=True,
    decoder=DECODER,
    read=read_shape,
    router=functools.partial(sigmoid_router, scale=2.5, groups=8, chosen_groups=4),
    native=True,
    megatron=MegatronModel(
        layers=LatentLayers,
        biases=("attention_bias",),
        rope_types=("default", "yarn"),
        lacks=_lacks,
        stores_own_names=True,
    ),
)
KIMI = Family(
    model_types=("kimi_k2",),
    decoder=DECODER,
    read=read_shape,
    untrainable="transformers has no such model_type; its layers are DeepSeek-V3's, so set model_type=deepseek_v3 in "
    "its config.json and remove auto_map",
)
