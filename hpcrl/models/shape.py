"""A decoder's sizes, and the name and shape of every parameter, as transformers would build them from a config.json."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

from hpcrl.models.tower import PREFIX, Tower

ParameterSplit = Literal["column", "row", "key", "vocabulary", "expert", "whole"]
"""What tensor parallelism splits, in this order: rows of a matrix, its columns, rows of key and value heads, rows of
the vocabulary, experts, or nothing."""

Unit = tuple[Literal["layer", "block"], int]
"""A decoder layer, or a block of the vision tower."""
MTP_PREFIX = "mtp."
"""Beginning of the names of trained MTP layers' parameters in a trainer (hpcrl.planner.mtp_memory)."""
ROUTER_BIAS = "e_score_correction_bias"
"""The end of the name of a buffer that trainers publish with the parameters."""
LAYER_COUNTS = ("num_hidden_layers", "depth")
MAX_LAYERS = 1000
"""Several times the maximum of published models. A plan's run time is quadratic in the number of layers."""
MAX_SIZE = 2**31 - 1
"""Maximum of all other sizes; most engines' kernels cannot index larger dimensions."""


class CannotPlanError(ValueError):
    """The parameters of this kind of model are not known."""


@dataclass(frozen=True)
class ExpertFiles:
    """Names in files, where each expert has separate matrices."""

    at: str = "mlp."
    """The beginning of the names of router and experts in a layer."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    correction: str = ""
    """The name of the router's bias per expert, if it differs from the name in memory."""


FILES = ExpertFiles()
"""Most families' names, whose beginning is also the beginning in transformers' memory."""


@dataclass(frozen=True)
class Decoder:
    """Properties of a family's decoder that do not depend on config.json."""

    qkv_bias: bool = False
    """Queries, keys and values have biases and the output projection has none; attention_bias is ignored."""
    reads_bias: bool = False
    """The decoder uses attention_bias, for queries, keys, values and the output projection."""
    attention_bias: bool = False
    """The default of attention_bias, where it is used."""
    qkv_bias_key: str = ""
    """The config.json key, if any, for the biases of queries, keys and values; qkv_bias is its default."""
    out_bias_key: str = ""
    """The config.json key, if any, for the bias of the output projection, instead of attention_bias."""
    mlp_bias_key: str = ""
    """The config.json key, if any, for the biases of MLPs."""
    qk_norm: bool = False
    """Query and key heads are normalised."""
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    """The last parts of these norms' names."""
    qk_norm_joint: bool = False
    """All query heads are normalised together, and all key heads."""
    qk_norm_last: bool = False
    """These norms are after the rotary embedding."""
    reads_qk_norm: bool = False
    """Query and key heads are normalised if use_qk_norm is true."""
    sinks: bool = False
    """Each head has a learned score that takes part in every softmax and has no value (arXiv 2309.17453)."""
    experts: bool = False
    """Layers have routed experts."""
    router_name: str = "gate"
    """The last part of the router's name."""
    correction_name: str = "gate.e_score_correction_bias"
    """The last part of the name of the router's bias per expert, if it has one."""
    biased_experts: bool = False
    """Router and experts have biases. Experts' matrices are [in, out], their gate and up columns alternate, and their
    MLP is clamped (swiglu_limit, swiglu_alpha)."""
    shared_name: str = "shared_experts"
    """The last part of the name of the shared experts, which are one MLP."""
    shared_gate: bool = False
    """The shared experts' output is multiplied by the sigmoid of a linear function of their input."""
    files: ExpertFiles = FILES
    """Experts' names in files; not used with biased_experts."""
    gemma: bool = False
    """Norms multiply by weight + 1 in float32, and there are norms after attention and after the MLP. Embeddings are
    scaled. The head is the embedding unless config.json has tie_word_embeddings=false. The MLP is gated by gelu."""
    centred_norms: bool = False
    """Norms multiply by weight + 1 in float32, except those of mixers' outputs."""
    gated_attention: bool = False
    """q_proj has each head's query and then its gate, whose sigmoid multiplies the head's output."""
    delta_rule: bool = False
    """Layers of type linear_attention mix tokens by the gated delta rule (arXiv 2412.06464)."""
    separate_delta: bool = False
    """Such layers have separate projections for queries, keys and values, for gates, and for the two factors; otherwise
    one for each group of value heads, and one for the factors."""
    norms_after: bool = False
    """Norms are after attention and after the MLP, instead of before."""
    tied: bool = False
    """The default of tie_word_embeddings."""
    joined: bool = False
    """Queries, keys and values have one joint matrix, and so do gate and up projection."""
    soft_capped: bool = False
    """The decoder uses attn_logit_softcapping: scores are cap * tanh(scores / cap) (arXiv 2408.00118)."""
    partly_rotated: bool = False
    """The decoder uses partial_rotary_factor."""
    adjacent_pairs: bool = False
    """The rotary embedding's pairs are adjacent dimensions, instead of a dimension of each half."""
    rope_alpha: bool = False
    """The decoder uses alpha with rope_type=dynamic: a factor of rope_theta, which does not depend on the length."""
    windows: Literal["none", "all", "by layer"] = "none"
    """The layers to which sliding_window applies; "by layer" means as layer_types defines."""
    window_switch: bool = False
    """There are windows only if use_sliding_window is true."""
    head_dim: int | None = None
    """Head width if config.json does not define it; None stands for hidden_size / heads."""

    @property
    def norm_offset(self) -> float:
        """What norms add to their weights."""
        return 1.0 if self.gemma or self.centred_norms else 0.0


@dataclass(frozen=True)
class Parameter:
    """One parameter; `layer` is None outside the decoder layers, `block` outside the blocks of a vision tower."""

    name: str
    shape: tuple[int, ...]
    split: ParameterSplit
    layer: int | None = None
    block: int | None = None

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def unit(self) -> Unit | None:
        """The layer or block to which it belongs."""
        if self.block is not None:
            return "block", self.block
        return None if self.layer is None else ("layer", self.layer)

    @property
    def in_layers(self) -> bool:
        """Whether it belongs to a decoder layer, to an MTP layer or, apart from its table of positions, to a vision
        tower."""
        in_tower = self.name.startswith(PREFIX) and "pos_embed" not in self.name
        return self.layer is not None or self.name.startswith(MTP_PREFIX) or in_tower


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (arXiv 2405.04434)."""

    query_rank: int | None  # the rank of queries; None if they have one full matrix
    rank: int  # the rank of keys and values
    nope: int  # width of a head's non-rotary part
    rope: int  # width of a head's rotary part
    value: int  # width of a head's values


@dataclass(frozen=True)
class ModelSource:
    """The text of a config.json, and whether the model is built with its vision tower."""

    config: str
    sees: bool


@dataclass(frozen=True)
class LayerCache:
    """What a generator keeps of one layer for each sequence, in numbers."""

    keys: int = 0
    """Of one token: keys and values, which tensor-parallel ranks share."""
    latents: int = 0
    """Of one token: latents and an indexer's keys, of which every rank has all."""
    state: int = 0
    """Of a sequence: a recurrent state, kept in float32."""
    convolved: int = 0
    """Of a sequence: the last inputs of convolutions."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes and all its parameters, tied parameters once."""

    family: str
    """model_type of config.json."""
    decoder: Decoder
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    num_experts: int
    experts_per_token: int
    expert_size: int
    expert_layers: frozenset[int]
    parameters: tuple[Parameter, ...] = ()
    latent: Latent | None = None
    shared_size: int = 0
    """Width of the shared experts."""
    tower: Tower | None = None
    """The vision tower of a model that takes images; None also if its activations are not known."""
    caches: tuple[LayerCache, ...] = ()
    """Of each layer; empty if all layers have keys and values of key_size, or the latents of `latent`."""
    linear: frozenset[str] | None = None
    """Names of all linear layers' matrices; None if they are those with a split in `parameters`."""
    attends: bool = True
    """Whether config.json has a number of attention heads; models without it are recurrent."""
    mtp_layers: int = 0
    """Trainable MTP layers that config.json names, whose parameters are not in `parameters`."""
    mtp_joins: int = 0
    """How often they have norms and a projection: once for all layers, or once for each."""
    source: ModelSource | None = None
    """From what transformers built the model (hpcrl.models.from_transformers); None if the family's file lists it."""

    @cached_property
    def splits(self) -> dict[str, ParameterSplit]:
        """How tensor parallelism splits each parameter, by name."""
        return {parameter.name: parameter.split for parameter in self.parameters}

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Width of all key heads, equal to the width of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def num_active(self) -> int:
        """Number of parameters that one token uses: of the experts, only the selected ones."""
        idle = sum(p.size for p in self.parameters if p.split == "expert")
        return self.num_parameters - idle + idle * self.experts_per_token // max(1, self.num_experts)

    @property
    def route_bytes(self) -> int:
        """Bytes of the field `routes` per token: its chosen experts (hpcrl.engines.expert_routes)."""
        return len(self.expert_layers) * self.experts_per_token * (1 if self.num_experts <= 255 else 2)

    @cached_property
    def unit_sizes(self) -> dict[Unit | None, int]:
        """Numbers of parameters in each decoder layer and tower block; key None: outside all of them."""
        sizes: dict[Unit | None, int] = {None: 0}
        for parameter in self.parameters:
            sizes[parameter.unit] = sizes.get(parameter.unit, 0) + parameter.size
        return sizes

    @property
    def gathered_together(self) -> tuple[int, int]:
        """Numbers of parameters in the largest decoder layer or tower block, and outside all of them."""
        inside = (size for unit, size in self.unit_sizes.items() if unit is not None)
        return max(inside, default=0), self.unit_sizes[None]

    def of_layer(self, layer: int | None) -> list[Parameter]:
        """The parameters of a layer; None selects the parameters outside the layers."""
        return [parameter for parameter in self.parameters if parameter.layer == layer]

    def with_linear(self, *endings: str) -> ModelShape:
        """With the linear layers whose matrices' names end like this."""
        return replace(self, linear=frozenset(p.name for p in self.parameters if p.name.endswith(endings)))


ParameterEntry = tuple[str, tuple[int, ...], ParameterSplit]
"""Name, shape and split of a parameter."""


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A JSON object in a config.json; empty if it is absent. CannotPlanError if it is not an object."""
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise CannotPlanError(f"{key} in config.json is not an object")
    return found


def decoder_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with its decoder's keys, which may be in text_config, at the top level."""
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, Mapping) else {})}


def size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size in a config.json. CannotPlanError if it is invalid, or missing without a default."""
    value = config.get(key)
    if value is None and key == "num_experts":
        value = config.get("num_local_experts")
    value = default if value is None else value
    if wrong := wrong_size(key, value):
        raise CannotPlanError(f"{key} in config.json is {wrong}")
    return int(value)  # type: ignore[arg-type]


def wrong_size(key: str, value: Any) -> str:
    """The error text for a size in a config.json; empty if it is valid."""
    most = MAX_LAYERS if key in LAYER_COUNTS else MAX_SIZE
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return f"{reprlib.repr(value)}, a whole number above 0 is needed"
    return f"{reprlib.repr(value)}, at most {most} is supported" if value > most else ""
