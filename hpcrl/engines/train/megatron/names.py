"""Megatron-Core's tensors and the HF tensors that they are made of, from a config.json alone: no Megatron, no model.

A Megatron tensor is put together from rows of HF tensors: query, key and value rows group by group, gate above up, or
the rows of one HF tensor as they are. Tensor parallelism divides it once more. Both are tables of rows here, so that
loading, publishing, exporting and converting read one description.

Written against megatron-core 0.16.1 and transformers 5.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hpcrl.planner.shapes import ModelShape, read_shape, wrong_size
from hpcrl.spec.weight_layout import Box

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "deepseek_v3")
"""The values of model_type in config.json that have a table."""

LayerSpec = Literal["local", "copied", "fused"]
"""Megatron's own layers; these with a copy of the matrices that make latents on every tensor parallel rank; or those of
Transformer Engine, which has such copies too, and the norm before a matrix in the matrix's module."""

EntryPlace = Literal["embedding", "layer", "norm", "head"]

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
VALUE_HEAD = "score"
"""A critic's head in transformers' models for token classification."""
_LIVE_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_LIVE_EXPERT = re.compile(r"(.*\.mlp\.experts\.)local_experts\.(\d+)(\..*)")
_GROUPED_EXPERT = re.compile(r"(.*\.mlp\.experts)(\.linear_fc[12]\.)(weight|bias)(\d+)")


@dataclass(frozen=True)
class EntryRows:
    """`count` rows of a Megatron tensor from row `at`: those of an HF tensor from row `first`. expert: of an HF tensor
    of all experts of a layer (transformers in memory), the entry of the first dimension."""

    hf: str
    first: int
    at: int
    count: int
    expert: int | None = None


@dataclass(frozen=True)
class Entry:
    """A tensor of GPTModel, whole: not divided by tensor parallelism.

    name: as in GPTModel's state dict if one rank had all layers and all experts. shape: with the padded vocabulary,
    whose last rows are in no HF tensor. place, layer, expert: who holds it. split: the dimension that tensor
    parallelism divides (expert tensor parallelism, for an expert); None: each rank has a copy. parts: equal parts of
    that dimension, each of which is divided (2: gate and up).
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[EntryRows, ...]
    place: EntryPlace
    layer: int | None = None
    expert: int | None = None
    split: int | None = None
    parts: int = 1

    @property
    def padding(self) -> int:
        """The last rows, which no HF tensor has."""
        return self.shape[0] - sum(rows.count for rows in self.rows)


@dataclass(frozen=True)
class HeldBox:
    """A box of an HF tensor that a rank holds: rows (first, last + 1) of its shard, one below the other."""

    hf: str
    box: Box
    at: tuple[tuple[int, int], ...]


class NameTable:
    """The tensors of a model in the order of its layers. shapes: HF name -> shape. tied: the head is the embedding."""

    def __init__(self, entries: Sequence[Entry], tied: bool):
        self.entries, self.tied = tuple(entries), tied
        self.shapes = _hf_shapes(self.entries)
        self._by_name = {entry.name: entry for entry in self.entries}

    def find(self, name: str, first_layer: int = 0, first_expert: int = 0) -> Entry:
        """The entry of a name in the state dict of a rank whose model chunk begins with the layer `first_layer`, and
        which holds the experts from `first_expert`. Of a tied model's head, the embedding. ValueError if there is
        none."""
        at = name.removeprefix("module.")
        if match := _LIVE_LAYER.match(at):
            at = f"decoder.layers.{int(match[1]) + first_layer}.{at[match.end() :]}"
        if match := _LIVE_EXPERT.fullmatch(at):
            at = f"{match[1]}local_experts.{int(match[2]) + first_expert}{match[3]}"
        elif match := _GROUPED_EXPERT.fullmatch(at):
            at = f"{match[1]}{match[2]}{match[3]}{int(match[4]) + first_expert}"
        if self.tied and at == HEAD:
            at = EMBEDDING
        if at not in self._by_name:
            raise ValueError(f"the Megatron tensor {name} ({at} in the whole model) has no HF name")
        return self._by_name[at]


def table(
    config: Mapping[str, Any],
    layers: LayerSpec = "local",
    padded_vocabulary: int | None = None,
    stacked: bool = False,
    values: bool = False,
) -> NameTable:
    """The table of the model of a config.json.

    padded_vocabulary: rows of Megatron's embedding (default: not padded). stacked: HF names as in transformers' memory,
    where one tensor has all experts of a layer, instead of those in files. values: with the head of a critic in place
    of the vocabulary's. ValueError if the family has no table or a size is missing.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} has no table of Megatron's names ({', '.join(FAMILIES)} have)")
    model = _Latent(config) if family == "deepseek_v3" else _Grouped(config)
    vocabulary, fused = model.vocabulary, layers == "fused"
    padded = vocabulary if padded_vocabulary is None else padded_vocabulary
    if padded < vocabulary:
        raise ValueError(f"a padded vocabulary of {padded} rows is smaller than vocab_size={vocabulary} in config.json")
    around = (padded, model.hidden)
    found = [_whole(EMBEDDING, "model.embed_tokens.weight", around, "embedding", split=0, count=vocabulary)]
    for layer in range(model.num_layers):
        at, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        inside = [*model.attention(layers), *model.mlp(layer, fused, stacked)]
        found += [replace(_below(entry, at, hf), layer=layer) for entry in inside]
    found.append(_whole("decoder.final_layernorm.weight", "model.norm.weight", around[1:], "norm"))
    if values:
        found.append(_whole(HEAD, f"{VALUE_HEAD}.weight", (1, model.hidden), "head"))
        found.append(_whole("output_layer.bias", f"{VALUE_HEAD}.bias", (1,), "head"))
    elif not model.tied:
        found.append(_whole(HEAD, "lm_head.weight", around, "head", split=0, count=vocabulary))
    return NameTable(found, model.tied and not values)


def shard_shape(entry: Entry, num_ranks: int) -> tuple[int, ...]:
    """The shape of one tensor parallel rank's part. ValueError if the ranks do not divide the tensor."""
    if entry.split is None:
        return entry.shape
    size = entry.shape[entry.split]
    if size % (entry.parts * num_ranks):
        unit = f"{entry.parts} x {num_ranks}" if entry.parts > 1 else f"{num_ranks}"
        raise ValueError(f"{entry.name} {list(entry.shape)}: {size} cannot be divided by {unit} tensor parallel ranks")
    return (*entry.shape[: entry.split], size // num_ranks, *entry.shape[entry.split + 1 :])


def held(entry: Entry, rank: int = 0, num_ranks: int = 1) -> list[HeldBox]:
    """The boxes of HF tensors that a tensor parallel rank's shard has, neighbouring rows in one box; none has padding.

    A rank has one box of each tensor, except of `stacked` gate and up, and of queries if there are more ranks than key
    heads.
    """
    shape = shard_shape(entry, num_ranks)
    columns = [(0, size) for size in shape[1:]]
    if entry.split == 1:
        columns[0] = (rank * shape[1], (rank + 1) * shape[1])
    found: dict[str, list[EntryRows]] = {}
    at = 0
    for first, last in _row_spans(entry, rank, num_ranks):
        for rows in entry.rows:
            low, high = max(first, rows.at), min(last, rows.at + rows.count)
            if low < high:
                here = replace(rows, first=rows.first + low - rows.at, at=at + low - first, count=high - low)
                found.setdefault(rows.hf, []).append(here)
        at += last - first
    return [
        part for rows in found.values() for part in _joined(sorted(rows, key=operator.attrgetter("first")), columns)
    ]


def shard(
    entry: Entry,
    tensors: Mapping[str, Any],
    rank: int = 0,
    num_ranks: int = 1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor parallel rank's part of a Megatron tensor (with one rank: the whole tensor), on the CPU, padding zero.

    tensors: HF name -> tensor, or anything that gives a tensor for `[rows, columns]`, such as safetensors' get_slice:
    only what the rank holds is read. ValueError if a tensor is missing.
    """
    result: Tensor | None = None
    for part in held(entry, rank, num_ranks):
        if part.hf not in tensors:
            raise ValueError(f"the HF tensor {part.hf} of Megatron's {entry.name} is missing")
        read = tensors[part.hf][tuple(slice(*span) for span in part.box)]
        if result is None:
            result = torch.zeros(shard_shape(entry, num_ranks), dtype=dtype or read.dtype)
        read = read.reshape(-1, *result.shape[1:])
        for (first, last), rows in zip(part.at, read.split([b - a for a, b in part.at]), strict=True):
            result[first:last] = rows
    if result is None:  # all of it is padding
        if dtype is None:
            dtype = tensors[entry.rows[0].hf][(slice(0, 1),) * len(entry.shape)].dtype
        result = torch.zeros(shard_shape(entry, num_ranks), dtype=dtype)
    return result


def parts(entry: Entry, part: Tensor, rank: int = 0, num_ranks: int = 1) -> Iterator[tuple[str, Box, Tensor]]:
    """The inverse: (HF name, box, values) of a rank's shard, in the order of held(). Values that are neighbours in the
    shard are a view of it, others a copy.

    ValueError if the shard has another shape than such a rank's.
    """
    if tuple(part.shape) != (shape := shard_shape(entry, num_ranks)):
        raise ValueError(f"{entry.name}: a shard of shape {list(part.shape)}, config.json requires {list(shape)}")
    for piece in held(entry, rank, num_ranks):
        rows = [part[first:last] for first, last in piece.at]
        values = rows[0] if len(rows) == 1 else torch.cat(rows)
        yield piece.hf, piece.box, values.view(tuple(last - first for first, last in piece.box))


def _row_spans(entry: Entry, rank: int, num_ranks: int) -> list[tuple[int, int]]:
    """Rows of the whole tensor that are in a rank's shard, in the order of the shard."""
    if entry.split != 0 or num_ranks == 1:
        return [(0, entry.shape[0])]
    part = entry.shape[0] // entry.parts
    size = part // num_ranks
    return [(number * part + rank * size, number * part + (rank + 1) * size) for number in range(entry.parts)]


def _joined(pieces: Sequence[EntryRows], columns: Sequence[tuple[int, int]]) -> Iterator[HeldBox]:
    """The boxes of pieces of one HF tensor, sorted by its rows."""
    runs: list[list[EntryRows]] = []
    for rows in pieces:
        if runs and runs[-1][-1].first + runs[-1][-1].count == rows.first:
            runs[-1].append(rows)
        else:
            runs.append([rows])
    for run in runs:
        leading = () if run[0].expert is None else ((run[0].expert, run[0].expert + 1),)
        span = (run[0].first, run[-1].first + run[-1].count)
        yield HeldBox(run[0].hf, (*leading, span, *columns), tuple((rows.at, rows.at + rows.count) for rows in run))


def _hf_shapes(entries: Sequence[Entry]) -> dict[str, tuple[int, ...]]:
    ends: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        for rows in entry.rows:
            leading = () if rows.expert is None else (rows.expert + 1,)
            shape = (*leading, rows.first + rows.count, *entry.shape[1:])
            ends[rows.hf] = tuple(map(max, ends.get(rows.hf, shape), shape))
    return ends


def _whole(
    name: str,
    hf: str,
    shape: Sequence[int],
    place: EntryPlace = "layer",
    split: int | None = None,
    count: int | None = None,
) -> Entry:
    """A Megatron tensor equal to an HF tensor; count: rows without padding."""
    rows = (EntryRows(hf, 0, 0, shape[0] if count is None else count),)
    return Entry(name, tuple(shape), rows, place, split=split)


def _below(entry: Entry, at: str, hf: str) -> Entry:
    rows = tuple(replace(rows, hf=hf + rows.hf) for rows in entry.rows)
    return replace(entry, name=at + entry.name, rows=rows)


def _gated(name: str, gate: str, up: str, inner: int, rest: Sequence[int]) -> Entry:
    """Gate above up."""
    rows = (EntryRows(gate, 0, 0, inner), EntryRows(up, 0, inner, inner))
    return Entry(name, (2 * inner, *rest), rows, "layer", split=0, parts=2)


def _dense(at: str, hf: str, hidden: int, inner: int, bias: bool = False) -> Iterator[Entry]:
    """A gated MLP."""
    for which, rest in (("weight", (hidden,)), *((("bias", ()),) if bias else ())):
        yield _gated(f"{at}linear_fc1.{which}", f"{hf}gate_proj.{which}", f"{hf}up_proj.{which}", inner, rest)
    yield _whole(f"{at}linear_fc2.weight", f"{hf}down_proj.weight", (hidden, inner), split=1)
    if bias:
        yield _whole(f"{at}linear_fc2.bias", f"{hf}down_proj.bias", (hidden,))


def _experts(count: int, hidden: int, inner: int, fused: bool, stacked: bool) -> Iterator[Entry]:
    for expert in range(count):
        if fused:
            fc1, fc2 = (f"mlp.experts.linear_{fc}.weight{expert}" for fc in ("fc1", "fc2"))
        else:
            fc1, fc2 = (f"mlp.experts.local_experts.{expert}.linear_{fc}.weight" for fc in ("fc1", "fc2"))
        if stacked:
            gate_up = (EntryRows("mlp.experts.gate_up_proj", 0, 0, 2 * inner, expert),)
            down = (EntryRows("mlp.experts.down_proj", 0, 0, hidden, expert),)
            yield Entry(fc1, (2 * inner, hidden), gate_up, "layer", expert=expert, split=0, parts=2)
            yield Entry(fc2, (hidden, inner), down, "layer", expert=expert, split=1)
        else:
            hf = f"mlp.experts.{expert}."
            gated = _gated(fc1, f"{hf}gate_proj.weight", f"{hf}up_proj.weight", inner, (hidden,))
            yield replace(gated, expert=expert)
            yield replace(_whole(fc2, f"{hf}down_proj.weight", (hidden, inner), split=1), expert=expert)


class _Grouped:
    """The layers of a decoder with grouped-query attention."""

    def __init__(self, config: Mapping[str, Any]):
        shape = self._shape = read_shape(config)
        self.hidden, self.vocabulary = shape.hidden_size, shape.vocab_size
        self.num_layers, self.tied = shape.num_layers, shape.tied
        if shape.num_heads % shape.num_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads={shape.num_heads} is not a multiple of "
                f"num_key_value_heads={shape.num_kv_heads}"
            )

    def attention(self, layers: LayerSpec) -> Iterator[Entry]:
        shape, at, hf, hidden = self._shape, "self_attention.", "self_attn.", self.hidden
        norm = at + "linear_qkv.layer_norm_weight" if layers == "fused" else "input_layernorm.weight"
        yield _whole(norm, "input_layernorm.weight", (hidden,))
        yield _qkv(shape, "weight", (hidden,))
        if shape.qkv_bias:
            yield _qkv(shape, "bias", ())
        if shape.qk_norm:
            yield _whole(at + "q_layernorm.weight", hf + "q_norm.weight", (shape.head_dim,))
            yield _whole(at + "k_layernorm.weight", hf + "k_norm.weight", (shape.head_dim,))
        yield _whole(at + "linear_proj.weight", hf + "o_proj.weight", (hidden, shape.query_size), split=1)
        if shape.out_bias:
            yield _whole(at + "linear_proj.bias", hf + "o_proj.bias", (hidden,))

    def mlp(self, layer: int, fused: bool, stacked: bool) -> Iterator[Entry]:
        shape, mixed = self._shape, layer in self._shape.expert_layers
        norm = "mlp.linear_fc1.layer_norm_weight" if fused and not mixed else "pre_mlp_layernorm.weight"
        yield _whole(norm, "post_attention_layernorm.weight", (self.hidden,))
        if mixed:
            yield _whole("mlp.router.weight", "mlp.gate.weight", (shape.num_experts, self.hidden))
            yield from _experts(shape.num_experts, self.hidden, shape.expert_size, fused, stacked)
        else:
            yield from _dense("mlp.", "mlp.", self.hidden, shape.intermediate_size, shape.mlp_bias)


def _qkv(shape: ModelShape, which: str, rest: Sequence[int]) -> Entry:
    """Of each group of heads that share a key: its query rows, its key rows, its value rows."""
    key = shape.head_dim
    query = shape.query_size // shape.num_kv_heads
    rows = []
    for group in range(shape.num_kv_heads):
        at = group * (query + 2 * key)
        for name, size in (("q", query), ("k", key), ("v", key)):
            rows.append(EntryRows(f"self_attn.{name}_proj.{which}", group * size, at, size))
            at += size
    sizes = (shape.query_size + 2 * shape.key_size, *rest)
    return Entry(f"self_attention.linear_qkv.{which}", sizes, tuple(rows), "layer", split=0)


class _Latent:
    """The layers of DeepSeek-V3 (arXiv 2412.19437): multi-head latent attention, shared and routed experts. The layers
    that predict further tokens (num_nextn_predict_layers) have no entries: transformers has none either."""

    def __init__(self, config: Mapping[str, Any]):
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
        yield _whole("input_layernorm.weight", "input_layernorm.weight", (self.hidden,))
        if self._config.get("q_lora_rank") is None:
            query = (heads * (nope + rope), self.hidden)
            yield _whole(at + "linear_q_proj.weight", hf + "q_proj.weight", query, split=0)
        else:
            narrow = size("q_lora_rank")
            norm = at + ("linear_q_up_proj.layer_norm_weight" if fused else "q_layernorm.weight")
            yield _whole(at + "linear_q_down_proj.weight", hf + "q_a_proj.weight", (narrow, self.hidden), split=down)
            yield _whole(norm, hf + "q_a_layernorm.weight", (narrow,))
            query = (heads * (nope + rope), narrow)
            yield _whole(at + "linear_q_up_proj.weight", hf + "q_b_proj.weight", query, split=0)
        compressed = (latent + rope, self.hidden)
        norm = at + ("linear_kv_up_proj.layer_norm_weight" if fused else "kv_layernorm.weight")
        yield _whole(at + "linear_kv_down_proj.weight", hf + "kv_a_proj_with_mqa.weight", compressed, split=down)
        yield _whole(norm, hf + "kv_a_layernorm.weight", (latent,))
        both = (heads * (nope + value), latent)
        yield _whole(at + "linear_kv_up_proj.weight", hf + "kv_b_proj.weight", both, split=0)
        yield _whole(at + "linear_proj.weight", hf + "o_proj.weight", (self.hidden, heads * value), split=1)

    def mlp(self, layer: int, fused: bool, stacked: bool) -> Iterator[Entry]:
        mixed = layer >= int(self._config.get("first_k_dense_replace") or 0)
        norm = "mlp.linear_fc1.layer_norm_weight" if fused and not mixed else "pre_mlp_layernorm.weight"
        yield _whole(norm, "post_attention_layernorm.weight", (self.hidden,))
        if not mixed:
            yield from _dense("mlp.", "mlp.", self.hidden, self._size("intermediate_size"))
            return
        count, inner = self._size("n_routed_experts"), self._size("moe_intermediate_size")
        yield _whole("mlp.router.weight", "mlp.gate.weight", (count, self.hidden))
        yield _whole("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", (count,))
        if shared := self._config.get("n_shared_experts"):
            yield from _dense("mlp.shared_experts.", "mlp.shared_experts.", self.hidden, inner * int(shared))
        yield from _experts(count, self.hidden, inner, fused, stacked)
