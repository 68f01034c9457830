"""DeepSeek-V3 (arXiv 2412.19437): latent attention, shared and routed experts, multi-token prediction layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hpcrl.models.family import Family, MegatronModel
from hpcrl.models.grouped import decoder_parameters, gated_mlp, norms, routed_experts
from hpcrl.models.megatron_entries import Entry, LayerSpec, copied, dense, experts
from hpcrl.models.rope import rope_type, ropes
from hpcrl.models.shape import Decoder, Latent, ModelShape, ParameterEntry, size, wrong_size

DEFAULTS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
}


def read_shape(family: str, decoder: Decoder, config: Mapping[str, Any]) -> ModelShape:
    """The shape of transformers' model, which has no multi-token prediction layers. The router's bias per expert counts
    as a parameter, because checkpoints contain it and generators need it."""
    sizes = {key: size(config, key, default) for key, default in DEFAULTS.items()}
    narrow = config.get("q_lora_rank", 1536)
    latent = Latent(
        None if narrow is None else size(config, "q_lora_rank", 1536),
        sizes["kv_lora_rank"],
        sizes["qk_nope_head_dim"],
        sizes["qk_rope_head_dim"],
        sizes["v_head_dim"],
    )
    layers, heads, dense = size(config, "num_hidden_layers"), size(config, "num_attention_heads"), 3
    if (given := config.get("first_k_dense_replace")) is not None:
        dense = given if isinstance(given, int) and given >= 0 else size(config, "first_k_dense_replace")
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
        mlp_bias=False,
        num_experts=sizes["n_routed_experts"],
        experts_per_token=sizes["num_experts_per_tok"],
        expert_size=sizes["moe_intermediate_size"],
        expert_layers=frozenset(range(dense, layers)),
        latent=latent,
        shared_size=sizes["moe_intermediate_size"] * sizes["n_shared_experts"],
    )
    inside = [[*_attention(shape, latent), *_mlp(shape, layer), *norms(shape)] for layer in range(layers)]
    return replace(shape, parameters=tuple(decoder_parameters(shape, inside)))


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


def _mlp(shape: ModelShape, layer: int) -> Iterator[ParameterEntry]:
    if layer not in shape.expert_layers:
        yield from gated_mlp("mlp.", shape.hidden_size, shape.intermediate_size)
        return
    yield from routed_experts(shape)
    yield "mlp.gate.e_score_correction_bias", (shape.num_experts,), "whole"
    yield from gated_mlp("mlp.shared_experts.", shape.hidden_size, shape.shared_size)


class LatentLayers:
    """The layers in Megatron-Core (MegatronLayers), without multi-token prediction layers, as in transformers."""

    def __init__(self, config: Mapping[str, Any], shape: ModelShape):
        self._config = config
        self.hidden, self.vocabulary = self._size("hidden_size"), self._size("vocab_size")
        self.num_layers, self.tied = self._size("num_hidden_layers"), bool(config.get("tie_word_embeddings", False))
        if config.get("attention_bias"):
            raise ValueError("config.json: attention_bias=true of a deepseek_v3 model has no table of Megatron's names")

    def _size(self, key: str) -> int:
        value = self._config.get(key)
        if wrong := wrong_size(key, value):
            raise ValueError(f"{key} in config.json is {wrong}")
        return int(value)  # type: ignore[arg-type]

    def attention(self, layers: LayerSpec) -> Iterator[Entry]:
        at, hf, size, fused = "self_attention.", "self_attn.", self._size, layers == "fused"
        down = 0 if layers == "local" else None
        heads, nope, rope, value = map(
            size, ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        latent = size("kv_lora_rank")
        yield copied("input_layernorm.weight", "input_layernorm.weight", (self.hidden,))
        if self._config.get("q_lora_rank") is None:
            query = (heads * (nope + rope), self.hidden)
            yield copied(at + "linear_q_proj.weight", hf + "q_proj.weight", query, split=0)
        else:
            narrow = size("q_lora_rank")
            norm = at + ("linear_q_up_proj.layer_norm_weight" if fused else "q_layernorm.weight")
            yield copied(at + "linear_q_down_proj.weight", hf + "q_a_proj.weight", (narrow, self.hidden), split=down)
            yield copied(norm, hf + "q_a_layernorm.weight", (narrow,))
            query = (heads * (nope + rope), narrow)
            yield copied(at + "linear_q_up_proj.weight", hf + "q_b_proj.weight", query, split=0)
        compressed = (latent + rope, self.hidden)
        norm = at + ("linear_kv_up_proj.layer_norm_weight" if fused else "kv_layernorm.weight")
        yield copied(at + "linear_kv_down_proj.weight", hf + "kv_a_proj_with_mqa.weight", compressed, split=down)
        yield copied(norm, hf + "kv_a_layernorm.weight", (latent,))
        both = (heads * (nope + value), latent)
        yield copied(at + "linear_kv_up_proj.weight", hf + "kv_b_proj.weight", both, split=0)
        yield copied(at + "linear_proj.weight", hf + "o_proj.weight", (self.hidden, heads * value), split=1)

    def mlp(self, layer: int, fused: bool, stacked: bool) -> Iterator[Entry]:
        mixed = layer >= int(self._config.get("first_k_dense_replace") or 0)
        norm = "mlp.linear_fc1.layer_norm_weight" if fused and not mixed else "pre_mlp_layernorm.weight"
        yield copied(norm, "post_attention_layernorm.weight", (self.hidden,))
        if not mixed:
            yield from dense("mlp.", "mlp.", self.hidden, self._size("intermediate_size"))
            return
        count, inner = self._size("n_routed_experts"), self._size("moe_intermediate_size")
        yield copied("mlp.router.weight", "mlp.gate.weight", (count, self.hidden))
        yield copied("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", (count,))
        if shared := self._config.get("n_shared_experts"):
            yield from dense("mlp.shared_experts.", "mlp.shared_experts.", self.hidden, inner * int(shared))
        yield from experts(count, self.hidden, inner, fused, stacked)


def _lacks(model: Mapping[str, Any]) -> Iterator[str]:
    """Features with which Megatron-Core's layers would compute something different from transformers' DeepseekV3."""
    rotated = model.get("qk_rope_head_dim", 64)
    if (width := model.get("head_dim", rotated)) != rotated:
        yield f"rotates the qk_rope_head_dim numbers of a head, {rotated}, not head_dim={width} of them"
    for key in ("rope_interleave", "norm_topk_prob"):
        if not model.get(key, True):
            yield f"has no {key}=false"
    for rope in (rope for rope in ropes(model) if rope_type(rope) == "yarn"):
        both = rope.get("mscale"), rope.get("mscale_all_dim")
        if not both[0] or both[0] != both[1] or rope.get("attention_factor"):
            yield f"has yarn with mscale equal to mscale_all_dim only, not with {both[0]} and {both[1]}"
    groups, chosen = model.get("n_group", 8), model.get("topk_group", 4)
    if groups and groups > 1 and model.get("num_experts_per_tok", 8) // chosen != 2:
        yield (
            f"chooses groups of experts by their best num_experts_per_tok / topk_group, which must be 2, the model has "
            f"{model.get('num_experts_per_tok', 8)} / {chosen}"
        )


FAMILY = Family(
    model_types=("deepseek_v3",),
    decoder=Decoder(),
    read=read_shape,
    megatron=MegatronModel(
        layers=LatentLayers,
        biases=("attention_bias",),
        rope_types=("default", "yarn"),
        lacks=_lacks,
        stores_own_names=True,
    ),
    predicts_further="num_nextn_predict_layers",
)
KIMI = Family(
    model_types=("kimi_k2",),
    decoder=Decoder(),
    read=read_shape,
    predicts_further="num_nextn_predict_layers",
    untrainable="transformers has no such model_type; its layers are DeepSeek-V3's, so set model_type=deepseek_v3 in "
    "its config.json and remove auto_map",
)
