"""Every parameter of a model, by name and shape, from its config.json, as transformers would build it."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

from hpcrl.config import TinyModel

ParameterSplit = Literal["column", "row", "key", "vocabulary", "expert", "whole"]
"""Tensor parallelism splits rows of a matrix, columns, rows of key and value heads, rows of the vocabulary, experts, or
nothing."""

FAMILIES = (
    *("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "ministral", "phi3", "gemma2", "gemma3_text"),
    *("qwen2_5_vl", "deepseek_v3"),
)
GEMMA = ("gemma2", "gemma3_text")
HEAD_DIM = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}
"""Head width if config.json does not give it; for other families, hidden_size / heads."""
EXPERT_DEFAULTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1}
LATENT_DEFAULTS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
}
"""Of deepseek_v3."""
VISION_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
}
IN_CHANNELS = 3
LAYER_COUNTS = ("num_hidden_layers", "depth")
MAX_LAYERS = 1000
"""Several times more than published models have; the time of a plan grows with the square of the layers."""
MAX_SIZE = 2**31 - 1
"""Of any other size; the kernels of most engines cannot index tensors beyond it."""


class CannotPlanError(ValueError):
    """The parameters of this kind of model are not known."""


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
    values, and the widths of a head's parts without and with positions, and of its values."""

    query_rank: int | None
    rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder, named as in config.json, and all its parameters (tied ones once)."""

    family: str
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
    """Width of the experts that every token has."""

    @cached_property
    def splits(self) -> dict[str, ParameterSplit]:
        """How tensor parallelism splits each parameter, by name."""
        return {parameter.name: parameter.split for parameter in self.parameters}

    @property
    def qk_norm(self) -> bool:
        """Whether query and key heads are normalised."""
        return self.family in ("qwen3", "qwen3_moe", "gemma3_text")

    @property
    def post_norms(self) -> bool:
        """Whether the results of attention and of the feed-forward layer are normalised too."""
        return self.family in GEMMA

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Width of all key heads, equal to that of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def num_active(self) -> int:
        """Parameters active for one token: of the experts, only the selected ones."""
        idle = sum(p.size for p in self.parameters if p.split == "expert")
        return self.num_parameters - idle + idle * self.experts_per_token // max(1, self.num_experts)

    @property
    def route_bytes(self) -> int:
        """Bytes of the experts that were chosen for a token (the field `routes`, hpcrl.engines.expert_routes)."""
        return len(self.expert_layers) * self.experts_per_token * (1 if self.num_experts <= 255 else 2)

    def of_layer(self, layer: int | None) -> list[Parameter]:
        """The parameters of a layer; for None, those outside the layers."""
        return [parameter for parameter in self.parameters if parameter.layer == layer]


def tiny_config(tiny: TinyModel) -> dict[str, Any]:
    """The config.json of model.tiny, which hpcrl.engines.tiny creates."""
    return {
        "model_type": tiny.architecture,
        "vocab_size": tiny.vocab_size,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.intermediate_size,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
        "num_key_value_heads": tiny.num_kv_heads,
        "head_dim": tiny.hidden_size // tiny.num_heads,
        "tie_word_embeddings": tiny.tie_word_embeddings,
        "num_experts": tiny.num_experts,
        "num_experts_per_tok": min(2, tiny.num_experts),
        "moe_intermediate_size": tiny.intermediate_size,
    }


def shape_of(folder: str | None, key: str) -> ModelShape:
    """The parameters of the model in a folder; `key` names it. CannotPlanError if its config.json cannot be read."""
    path = Path(folder or "") / "config.json"
    try:
        return read_shape(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise CannotPlanError(f"{key}: {path} cannot be read: {error}") from error


def known_shape(folder: Path) -> ModelShape | None:
    """The parameters of the model in a folder; None if they are not known."""
    try:
        return shape_of(str(folder), "model.path")
    except CannotPlanError:
        return None


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The model described by a config.json, with the defaults of transformers 5 for missing keys.

    CannotPlanError if the family is not in FAMILIES, or a size is missing, too large or not a whole number above 0.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise CannotPlanError(f"its parameters are not known for model_type {family!r} ({', '.join(FAMILIES)} are)")
    if family == "deepseek_v3":
        return _read_latent(config)
    text = {**config, **_section(config, "text_config")} if family == "qwen2_5_vl" else config
    heads, hidden = _size(text, "num_attention_heads"), _size(text, "hidden_size")
    bias = bool(text.get("attention_bias", False)) and family not in ("mistral", "ministral", "phi3")
    experts = {key: _size(text, key, default) for key, default in EXPERT_DEFAULTS.items()} if "moe" in family else {}
    layers = _size(text, "num_hidden_layers")
    dense = text.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise CannotPlanError(f"mlp_only_layers in config.json is {dense!r}, a list of layers is needed")
    shape = ModelShape(
        family=family,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_size(text, "num_key_value_heads", heads),
        head_dim=_size(text, "head_dim", HEAD_DIM.get(family, hidden // heads)),
        intermediate_size=_size(text, "intermediate_size"),
        vocab_size=_size(text, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", family in GEMMA))),
        qkv_bias=bias or family in ("qwen2", "qwen2_5_vl"),
        out_bias=bias and family not in ("qwen2", "qwen2_5_vl"),
        mlp_bias=family == "llama" and bool(text.get("mlp_bias", False)),
        num_experts=experts.get("num_experts", 0),
        experts_per_token=experts.get("num_experts_per_tok", 0),
        expert_size=experts.get("moe_intermediate_size", 0),
        expert_layers=frozenset(
            layer
            for layer in range(layers)
            if experts and layer not in dense and (layer + 1) % experts["decoder_sparse_step"] == 0
        ),
    )
    parameters = [*(_vision(_section(config, "vision_config")) if family == "qwen2_5_vl" else ()), *_decoder(shape)]
    return ModelShape(**{**shape.__dict__, "parameters": tuple(parameters)})


def _read_latent(config: Mapping[str, Any]) -> ModelShape:
    """Of DeepSeek-V3 (arXiv 2412.19437). The layers that predict further tokens are not in transformers' model. The
    router's bias of each expert is counted as a parameter: it is in checkpoints, and travels to generators."""
    sizes = {key: _size(config, key, default) for key, default in LATENT_DEFAULTS.items()}
    narrow = config.get("q_lora_rank", 1536)
    latent = Latent(
        None if narrow is None else _size(config, "q_lora_rank", 1536),
        sizes["kv_lora_rank"],
        sizes["qk_nope_head_dim"],
        sizes["qk_rope_head_dim"],
        sizes["v_head_dim"],
    )
    layers, heads, dense = _size(config, "num_hidden_layers"), _size(config, "num_attention_heads"), 3
    if (given := config.get("first_k_dense_replace")) is not None:
        dense = given if isinstance(given, int) and given >= 0 else _size(config, "first_k_dense_replace")
    shape = ModelShape(
        family="deepseek_v3",
        hidden_size=_size(config, "hidden_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=latent.nope + latent.rope,
        intermediate_size=_size(config, "intermediate_size"),
        vocab_size=_size(config, "vocab_size"),
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
    return replace(shape, parameters=tuple(_decoder(shape)))


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = config.get(key) or {}
    if not isinstance(section, Mapping):
        raise CannotPlanError(f"{key} in config.json is not an object")
    return section


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and key == "num_experts":
        value = config.get("num_local_experts")
    value = default if value is None else value
    if wrong := wrong_size(key, value):
        raise CannotPlanError(f"{key} in config.json is {wrong}")
    return int(value)  # type: ignore[arg-type]


def wrong_size(key: str, value: Any) -> str:
    """What is wrong with a size of a config.json, and what is needed; empty if it is valid."""
    most = MAX_LAYERS if key in LAYER_COUNTS else MAX_SIZE
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return f"{reprlib.repr(value)}, a whole number above 0 is needed"
    return f"{reprlib.repr(value)}, at most {most} is supported" if value > most else ""


def _decoder(shape: ModelShape) -> Iterator[Parameter]:
    """The language model, in the order of transformers."""
    prefix = "model.language_model." if shape.family == "qwen2_5_vl" else "model."
    vocabulary = (shape.vocab_size, shape.hidden_size)
    yield Parameter(prefix + "embed_tokens.weight", vocabulary, "vocabulary")
    for layer in range(shape.num_layers):
        for name, sizes, split in (*_attention(shape), *_mlp(shape, layer), *_norms(shape)):
            yield Parameter(f"{prefix}layers.{layer}.{name}", sizes, split, layer)
    yield Parameter(prefix + "norm.weight", (shape.hidden_size,), "whole")
    if not shape.tied:
        yield Parameter("lm_head.weight", vocabulary, "vocabulary")


ParameterEntry = tuple[str, tuple[int, ...], ParameterSplit]


def _attention(shape: ModelShape) -> Iterator[ParameterEntry]:
    hidden, at = shape.hidden_size, "self_attn."
    if shape.latent is not None:
        yield from _latent_attention(shape, shape.latent)
        return
    if shape.family == "phi3":
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
    if shape.qk_norm:
        yield at + "q_norm.weight", (shape.head_dim,), "whole"
        yield at + "k_norm.weight", (shape.head_dim,), "whole"


def _latent_attention(shape: ModelShape, latent: Latent) -> Iterator[ParameterEntry]:
    """The matrices that make latents are whole on every tensor parallel rank."""
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
    hidden, inner = shape.hidden_size, shape.intermediate_size
    if layer in shape.expert_layers:
        count, inner = shape.num_experts, shape.expert_size
        yield "mlp.experts.gate_up_proj", (count, 2 * inner, hidden), "expert"
        yield "mlp.experts.down_proj", (count, hidden, inner), "expert"
        yield "mlp.gate.weight", (count, hidden), "whole"
        if shape.latent is not None:
            yield "mlp.gate.e_score_correction_bias", (count,), "whole"
            yield "mlp.shared_experts.gate_proj.weight", (shape.shared_size, hidden), "column"
            yield "mlp.shared_experts.up_proj.weight", (shape.shared_size, hidden), "column"
            yield "mlp.shared_experts.down_proj.weight", (hidden, shape.shared_size), "row"
        return
    if shape.family == "phi3":
        yield "mlp.gate_up_proj.weight", (2 * inner, hidden), "column"
        yield "mlp.down_proj.weight", (hidden, inner), "row"
        return
    for which, sizes, split in (
        ("gate", (inner, hidden), "column"),
        ("up", (inner, hidden), "column"),
        ("down", (hidden, inner), "row"),
    ):
        yield f"mlp.{which}_proj.weight", sizes, split  # type: ignore[misc]
        if shape.mlp_bias:
            yield f"mlp.{which}_proj.bias", sizes[:1], "whole" if which == "down" else "column"


def _norms(shape: ModelShape) -> Iterator[ParameterEntry]:
    names = ["input_layernorm", "post_attention_layernorm"]
    if shape.post_norms:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for name in names:
        yield f"{name}.weight", (shape.hidden_size,), "whole"


def _vision(config: Mapping[str, Any]) -> Iterator[Parameter]:
    """The vision tower of Qwen2.5-VL (arXiv 2502.13923), which is not split by any parallelism here."""
    sizes = {key: _size(config, key, default) for key, default in VISION_DEFAULTS.items()}
    hidden, inner, patch = sizes["hidden_size"], sizes["intermediate_size"], sizes["patch_size"]
    merged = hidden * sizes["spatial_merge_size"] ** 2

    def linear(name: str, rows: int, columns: int) -> Iterator[Parameter]:
        yield Parameter(f"model.visual.{name}.weight", (rows, columns), "whole")
        yield Parameter(f"model.visual.{name}.bias", (rows,), "whole")

    patches = (hidden, IN_CHANNELS, sizes["temporal_patch_size"], patch, patch)
    yield Parameter("model.visual.patch_embed.proj.weight", patches, "whole")
    for block in range(sizes["depth"]):
        for norm in ("norm1", "norm2"):
            yield Parameter(f"model.visual.blocks.{block}.{norm}.weight", (hidden,), "whole")
        yield from linear(f"blocks.{block}.attn.qkv", 3 * hidden, hidden)
        yield from linear(f"blocks.{block}.attn.proj", hidden, hidden)
        yield from linear(f"blocks.{block}.mlp.gate_proj", inner, hidden)
        yield from linear(f"blocks.{block}.mlp.up_proj", inner, hidden)
        yield from linear(f"blocks.{block}.mlp.down_proj", hidden, inner)
    yield Parameter("model.visual.merger.ln_q.weight", (hidden,), "whole")
    yield from linear("merger.mlp.0", merged, merged)
    yield from linear("merger.mlp.2", sizes["out_hidden_size"], merged)
