"""Decoders with grouped-query attention: their parameters, and their layers in Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcrl.models.megatron_entries import Entry, EntryRows, LayerSpec, copied, dense, routed
from hpcrl.models.shape import CannotPlanError, Decoder, ModelShape, Parameter, ParameterEntry, ParameterSplit, size


def every_step(config: Mapping[str, Any], layers: int) -> Iterator[int]:
    """The layers with experts according to decoder_sparse_step and mlp_only_layers."""
    dense_layers, step = config.get("mlp_only_layers") or (), size(config, "decoder_sparse_step", 1)
    if not isinstance(dense_layers, list | tuple):
        raise CannotPlanError(f"mlp_only_layers in config.json is {dense_layers!r}, a list of layers is needed")
    return (layer for layer in range(layers) if layer not in dense_layers and (layer + 1) % step == 0)


def first_dense(config: Mapping[str, Any], layers: int, default: int = 1) -> Iterator[int]:
    """The layers with experts according to first_k_dense_replace."""
    first = config.get("first_k_dense_replace")
    if first is None:
        first = default
    elif first != 0:
        first = size(config, "first_k_dense_replace")
    return iter(range(first, layers))


def all_layers(config: Mapping[str, Any], layers: int) -> Iterator[int]:
    """Every layer has experts."""
    return iter(range(layers))


def routed_experts(shape: ModelShape) -> Iterator[ParameterEntry]:
    """Experts, stacked as in transformers' memory, and their router."""
    count, inner, hidden = shape.num_experts, shape.expert_size, shape.hidden_size
    yield "mlp.experts.gate_up_proj", (count, 2 * inner, hidden), "expert"
    yield "mlp.experts.down_proj", (count, hidden, inner), "expert"
    yield f"mlp.{shape.decoder.router_name}.weight", (count, hidden), "whole"


def corrected_experts(shape: ModelShape) -> Iterator[ParameterEntry]:
    """As in DeepSeek-V3: routed experts, the router's bias per expert, and shared experts if there are any."""
    yield from routed_experts(shape)
    yield f"mlp.{shape.decoder.correction_name}", (shape.num_experts,), "whole"
    if shape.shared_size:
        yield from gated_mlp(f"mlp.{shape.decoder.shared_name}.", shape.hidden_size, shape.shared_size)


def no_shared(config: Mapping[str, Any]) -> int:
    """The width of shared experts in models without them."""
    return 0


@dataclass(frozen=True)
class Mixture:
    """Where a family's config.json has the sizes of its experts, as (key, default), and what its layers have."""

    count: tuple[str, int] = ("num_experts", 128)
    chosen: tuple[str, int] = ("num_experts_per_tok", 8)
    width: tuple[str, int | None] = ("moe_intermediate_size", 768)
    shared: Callable[[Mapping[str, Any]], int] = no_shared
    """Width of the shared experts."""
    layers: Callable[[Mapping[str, Any], int], Iterator[int]] = every_step
    """Called with config.json and the number of layers; yields the layers with experts."""
    parameters: Callable[[ModelShape], Iterator[ParameterEntry]] = routed_experts
    """The parameters of such a layer, instead of an MLP's."""


def grouped_shape(
    family: str,
    decoder: Decoder,
    config: Mapping[str, Any],
    prefix: str = "model.",
    mixture: Mixture = Mixture(),
) -> ModelShape:
    """The decoder of a config.json, with the defaults of transformers 5 for missing keys. `prefix` begins the names of
    its parameters. CannotPlanError if a size is missing, too large or not a whole number above 0."""
    heads, hidden = size(config, "num_attention_heads"), size(config, "hidden_size")
    bias = decoder.reads_bias and bool(config.get("attention_bias", decoder.attention_bias))
    qkv_bias = decoder.qkv_bias
    if decoder.qkv_bias_key:
        qkv_bias = bool(config.get(decoder.qkv_bias_key, qkv_bias))
    if decoder.reads_qk_norm:
        decoder = replace(decoder, qk_norm=bool(config.get("use_qk_norm", False)))
    sizes = [size(config, *key) for key in (mixture.count, mixture.chosen, mixture.width)] if decoder.experts else []
    count, chosen, width = sizes or (0, 0, 0)
    layers = size(config, "num_hidden_layers")
    shape = ModelShape(
        family=family,
        decoder=decoder,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=size(config, "num_key_value_heads", heads),
        head_dim=size(config, "head_dim", decoder.head_dim or hidden // heads),
        intermediate_size=size(config, "intermediate_size"),
        vocab_size=size(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", decoder.gemma or decoder.tied)),
        qkv_bias=bias or qkv_bias,
        out_bias=bool(config.get(decoder.out_bias_key, False)) if decoder.out_bias_key else bias,
        mlp_bias=bool(config.get(decoder.mlp_bias_key, False)),
        num_experts=count,
        experts_per_token=chosen,
        expert_size=width,
        expert_layers=frozenset(mixture.layers(config, layers)) if decoder.experts else frozenset(),
        shared_size=mixture.shared(config) if decoder.experts else 0,
    )
    of_experts = tuple(mixture.parameters(shape))
    inside = [
        [*_attention(shape), *(of_experts if layer in shape.expert_layers else _mlp(shape)), *norms(shape)]
        for layer in range(layers)
    ]
    return replace(shape, parameters=tuple(decoder_parameters(shape, inside, prefix)))


def decoder_parameters(
    shape: ModelShape, layers: Sequence[Sequence[ParameterEntry]], prefix: str = "model."
) -> Iterator[Parameter]:
    """The language model's parameters in transformers' order; `layers` has the entries of each layer."""
    vocabulary = (shape.vocab_size, shape.hidden_size)
    yield Parameter(prefix + "embed_tokens.weight", vocabulary, "vocabulary")
    for layer, entries in enumerate(layers):
        for name, sizes, split in entries:
            yield Parameter(f"{prefix}layers.{layer}.{name}", sizes, split, layer)
    yield Parameter(prefix + "norm.weight", (shape.hidden_size,), "whole")
    if not shape.tied:
        yield Parameter("lm_head.weight", vocabulary, "vocabulary")


def _attention(shape: ModelShape) -> Iterator[ParameterEntry]:
    hidden, at = shape.hidden_size, "self_attn."
    if shape.decoder.sinks:
        yield at + "sinks", (shape.num_heads,), "column"
    if shape.decoder.joined:
        yield at + "qkv_proj.weight", (shape.query_size + 2 * shape.key_size, hidden), "column"
        yield at + "o_proj.weight", (hidden, shape.query_size), "row"
        return
    sizes: tuple[tuple[str, int, ParameterSplit], ...] = (
        ("q", shape.query_size, "column"),
        ("k", shape.key_size, "key"),
        ("v", shape.key_size, "key"),
    )
    for which, rows, split in sizes:
        yield f"{at}{which}_proj.weight", (rows, hidden), split
        if shape.qkv_bias:
            yield f"{at}{which}_proj.bias", (rows,), split
    yield at + "o_proj.weight", (hidden, shape.query_size), "row"
    if shape.out_bias:
        yield at + "o_proj.bias", (hidden,), "whole"
    if shape.decoder.qk_norm:
        both = (shape.query_size, shape.key_size) if shape.decoder.qk_norm_joint else (shape.head_dim, shape.head_dim)
        for name, width in zip(shape.decoder.qk_norm_names, both, strict=True):
            yield f"{at}{name}.weight", (width,), "whole"


def _mlp(shape: ModelShape) -> Iterator[ParameterEntry]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    if shape.decoder.joined:
        yield "mlp.gate_up_proj.weight", (2 * inner, hidden), "column"
        yield "mlp.down_proj.weight", (hidden, inner), "row"
        return
    yield from gated_mlp("mlp.", hidden, inner, shape.mlp_bias)


def gated_mlp(at: str, hidden: int, inner: int, bias: bool = False) -> Iterator[ParameterEntry]:
    """gate_proj, up_proj and down_proj."""
    entries: tuple[tuple[str, tuple[int, int], ParameterSplit], ...] = (
        ("gate", (inner, hidden), "column"),
        ("up", (inner, hidden), "column"),
        ("down", (hidden, inner), "row"),
    )
    for which, sizes, split in entries:
        yield f"{at}{which}_proj.weight", sizes, split
        if bias:
            yield f"{at}{which}_proj.bias", sizes[:1], "whole" if which == "down" else "column"


def norms(shape: ModelShape) -> Iterator[ParameterEntry]:
    names = ["post_attention_layernorm"]
    if not shape.decoder.norms_after:
        names.append("input_layernorm")
    if shape.decoder.gemma:
        names.append("pre_feedforward_layernorm")
    if shape.decoder.gemma or shape.decoder.norms_after:
        names.append("post_feedforward_layernorm")
    for name in names:
        yield f"{name}.weight", (shape.hidden_size,), "whole"


class GroupedLayers:
    """The layers in Megatron-Core (MegatronLayers)."""

    def __init__(self, config: Mapping[str, Any], shape: ModelShape):
        self._shape = shape
        self.hidden, self.vocabulary = shape.hidden_size, shape.vocab_size
        self.num_layers, self.tied = shape.num_layers, shape.tied
        if shape.num_heads % shape.num_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads={shape.num_heads} is not a multiple of "
                f"num_key_value_heads={shape.num_kv_heads}"
            )

    def attention(self, layer: int, layers: LayerSpec) -> Iterator[Entry]:
        """See MegatronLayers."""
        shape, at, hf, hidden = self._shape, "self_attention.", "self_attn.", self.hidden
        norm = at + "linear_qkv.layer_norm_weight" if layers == "fused" else "input_layernorm.weight"
        yield copied(norm, "input_layernorm.weight", (hidden,))
        yield _qkv(shape, "weight", (hidden,))
        if shape.qkv_bias:
            yield _qkv(shape, "bias", ())
        if shape.decoder.qk_norm:
            yield copied(at + "q_layernorm.weight", hf + "q_norm.weight", (shape.head_dim,))
            yield copied(at + "k_layernorm.weight", hf + "k_norm.weight", (shape.head_dim,))
        if shape.decoder.sinks:
            yield copied(at + "core_attention.softmax_offset", hf + "sinks", (shape.num_heads,), split=0)
        yield copied(at + "linear_proj.weight", hf + "o_proj.weight", (hidden, shape.query_size), split=1)
        if shape.out_bias:
            yield copied(at + "linear_proj.bias", hf + "o_proj.bias", (hidden,))

    def mlp(self, layer: int, fused: bool, stacked: bool) -> Iterator[Entry]:
        shape, mixed = self._shape, layer in self._shape.expert_layers
        norm = "mlp.linear_fc1.layer_norm_weight" if fused and not mixed else "pre_mlp_layernorm.weight"
        yield copied(norm, "post_attention_layernorm.weight", (self.hidden,))
        if mixed:
            yield from self.mixture(fused, stacked)
        else:
            yield from dense("mlp.", "mlp.", self.hidden, shape.intermediate_size, shape.mlp_bias)

    def mixture(self, fused: bool, stacked: bool) -> Iterator[Entry]:
        """The tensors of a layer's router and experts."""
        shape = self._shape
        yield from routed(shape.num_experts, self.hidden, shape.expert_size, fused, stacked, shape.decoder.files)


class CorrectedLayers(GroupedLayers):
    """With a bias per expert in routers, and shared experts (corrected_experts)."""

    def mixture(self, fused: bool, stacked: bool) -> Iterator[Entry]:
        """See GroupedLayers."""
        yield from super().mixture(fused, stacked)
        yield copied("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", (self._shape.num_experts,))
        yield from dense("mlp.shared_experts.", "mlp.shared_experts.", self.hidden, self._shape.shared_size)


def _qkv(shape: ModelShape, which: str, rest: Sequence[int]) -> Entry:
    """Query rows, gate rows if attention is gated, key rows and value rows for each group of query heads that share a
    key head, group by group."""
    key, heads = shape.head_dim, shape.num_heads // shape.num_kv_heads
    rows, at = [], 0
    for group in range(shape.num_kv_heads):
        first = group * heads * key
        pieces = [("q", first, heads * key)]
        if shape.decoder.gated_attention:  # a head's query rows are before its gate rows
            pieces = [("q", 2 * (first + head * key) + gate, key) for gate in (0, key) for head in range(heads)]
        for name, start, count in (*pieces, ("k", group * key, key), ("v", group * key, key)):
            rows.append(EntryRows(f"self_attn.{name}_proj.{which}", start, at, count))
            at += count
    return Entry(f"self_attention.linear_qkv.{which}", (at, *rest), tuple(rows), "layer", split=0)
