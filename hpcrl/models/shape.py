"""The sizes of a decoder, and every parameter by name and shape, as transformers would build it from a config.json."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

ParameterSplit = Literal["column", "row", "key", "vocabulary", "expert", "whole"]
"""Tensor parallelism splits rows of a matrix, columns, rows of key and value heads, rows of the vocabulary, experts, or
nothing."""

LAYER_COUNTS = ("num_hidden_layers", "depth")
MAX_LAYERS = 1000
"""Several times the maximum of published models; a plan's run time is quadratic in the layers."""
MAX_SIZE = 2**31 - 1
"""Maximum of all other sizes; the kernels of most engines cannot index tensors beyond it."""


class CannotPlanError(ValueError):
    """The parameters of this kind of model are not known."""


@dataclass(frozen=True)
class Decoder:
    """Properties of a family's decoder that do not depend on config.json."""

    qkv_bias: bool = False
    """Queries, keys and values have biases, the output projection has none, whatever attention_bias says."""
    reads_bias: bool = False
    """Whether it reads attention_bias, for queries, keys, values and the output projection."""
    reads_mlp_bias: bool = False
    """Whether it reads mlp_bias."""
    qk_norm: bool = False
    """Query and key heads are normalised."""
    experts: bool = False
    """Layers have routed experts, according to num_experts, decoder_sparse_step and mlp_only_layers."""
    gemma: bool = False
    """Norms multiply by weight + 1, in float32, also after attention and after the MLP; embeddings are scaled, and the
    head is the embedding unless config.json says otherwise; the MLP is gated by gelu."""
    joined: bool = False
    """One matrix for q, k and v, and one for gate and up."""
    soft_capped: bool = False
    """Whether it reads attn_logit_softcapping: scores are cap * tanh(scores / cap) (arXiv 2408.00118)."""
    partly_rotated: bool = False
    """Whether it reads partial_rotary_factor."""
    windows: Literal["none", "all", "by layer"] = "none"
    """The layers to which sliding_window applies; by layer: as layer_types defines."""
    window_switch: bool = False
    """There are windows only if use_sliding_window is true."""
    head_dim: int | None = None
    """Head width if config.json does not give it; None: hidden_size / heads."""


@dataclass(frozen=True)
class Parameter:
    """One parameter; `layer` is None outside the decoder layers."""

    name: str
    shape: tuple[int, ...]
    split: ParameterSplit
    layer: int | None = None

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (arXiv 2405.04434): ranks of queries (None: one matrix) and of keys and
    values; widths of a head's non-rotary part, its rotary part and its values."""

    query_rank: int | None
    rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder, named as in config.json, and all its parameters (tied ones once)."""

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
        """Parameters active for one token: only the selected experts count."""
        idle = sum(p.size for p in self.parameters if p.split == "expert")
        return self.num_parameters - idle + idle * self.experts_per_token // max(1, self.num_experts)

    @property
    def route_bytes(self) -> int:
        """Bytes of a token's chosen experts (the field `routes`, hpcrl.engines.expert_routes)."""
        return len(self.expert_layers) * self.experts_per_token * (1 if self.num_experts <= 255 else 2)

    def of_layer(self, layer: int | None) -> list[Parameter]:
        """The parameters of a layer; for None, the parameters outside the layers."""
        return [parameter for parameter in self.parameters if parameter.layer == layer]


ParameterEntry = tuple[str, tuple[int, ...], ParameterSplit]
"""Name, shape and split of a parameter."""


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A JSON object in a config.json; empty if it is absent. CannotPlanError if it is not an object."""
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise CannotPlanError(f"{key} in config.json is not an object")
    return found


def size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size in a config.json. CannotPlanError if it is missing without a default, or not a size."""
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
