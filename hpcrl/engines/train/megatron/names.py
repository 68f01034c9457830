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
from typing import Any

import torch
from torch import Tensor

from hpcrl.models.families import MEGATRON, family_of, read_shape
from hpcrl.models.megatron_entries import Entry, EntryRows, LayerSpec, copied
from hpcrl.spec.weight_layout import TensorSlice

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
VALUE_HEAD = "score"
"""A critic's head in transformers' models for token classification."""
_LIVE_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_LIVE_EXPERT = re.compile(r"(.*\.mlp\.experts\.)local_experts\.(\d+)(\..*)")
_GROUPED_EXPERT = re.compile(r"(.*\.mlp\.experts)(\.linear_fc[12]\.)(weight|bias)(\d+)")


@dataclass(frozen=True)
class ShardSlice:
    """A box of an HF tensor that a rank holds: rows (first, last + 1) of its shard, one below the other."""

    hf: str
    tensor_slice: TensorSlice
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
    name = config.get("model_type")
    family = family_of(name).megatron
    if family is None:
        raise ValueError(f"model_type {name!r} has no table of Megatron's names ({', '.join(MEGATRON)} have)")
    model = family.layers(config, read_shape(config))
    vocabulary, fused = model.vocabulary, layers == "fused"
    padded = vocabulary if padded_vocabulary is None else padded_vocabulary
    if padded < vocabulary:
        raise ValueError(f"a padded vocabulary of {padded} rows is smaller than vocab_size={vocabulary} in config.json")
    around = (padded, model.hidden)
    found = [copied(EMBEDDING, "model.embed_tokens.weight", around, "embedding", split=0, count=vocabulary)]
    for layer in range(model.num_layers):
        at, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        inside = [*model.attention(layers), *model.mlp(layer, fused, stacked)]
        found += [replace(_below(entry, at, hf), layer=layer) for entry in inside]
    found.append(copied("decoder.final_layernorm.weight", "model.norm.weight", around[1:], "norm"))
    if values:
        found.append(copied(HEAD, f"{VALUE_HEAD}.weight", (1, model.hidden), "head"))
        found.append(copied("output_layer.bias", f"{VALUE_HEAD}.bias", (1,), "head"))
    elif not model.tied:
        found.append(copied(HEAD, "lm_head.weight", around, "head", split=0, count=vocabulary))
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


def held(entry: Entry, rank: int = 0, num_ranks: int = 1) -> list[ShardSlice]:
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
        read = tensors[part.hf][tuple(slice(*span) for span in part.tensor_slice)]
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


def parts(entry: Entry, part: Tensor, rank: int = 0, num_ranks: int = 1) -> Iterator[tuple[str, TensorSlice, Tensor]]:
    """The inverse: (HF name, box, values) of a rank's shard, in the order of held(). Values that are neighbours in the
    shard are a view of it, others a copy.

    ValueError if the shard has another shape than such a rank's.
    """
    if tuple(part.shape) != (shape := shard_shape(entry, num_ranks)):
        raise ValueError(f"{entry.name}: a shard of shape {list(part.shape)}, config.json requires {list(shape)}")
    for piece in held(entry, rank, num_ranks):
        rows = [part[first:last] for first, last in piece.at]
        values = rows[0] if len(rows) == 1 else torch.cat(rows)
        yield piece.hf, piece.tensor_slice, values.view(tuple(last - first for first, last in piece.tensor_slice))


def _row_spans(entry: Entry, rank: int, num_ranks: int) -> list[tuple[int, int]]:
    """Rows of the whole tensor that are in a rank's shard, in the order of the shard."""
    if entry.split != 0 or num_ranks == 1:
        return [(0, entry.shape[0])]
    part = entry.shape[0] // entry.parts
    size = part // num_ranks
    return [(number * part + rank * size, number * part + (rank + 1) * size) for number in range(entry.parts)]


def _joined(pieces: Sequence[EntryRows], columns: Sequence[tuple[int, int]]) -> Iterator[ShardSlice]:
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
        yield ShardSlice(run[0].hf, (*leading, span, *columns), tuple((rows.at, rows.at + rows.count) for rows in run))


def _hf_shapes(entries: Sequence[Entry]) -> dict[str, tuple[int, ...]]:
    ends: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        for rows in entry.rows:
            leading = () if rows.expert is None else (rows.expert + 1,)
            shape = (*leading, rows.first + rows.count, *entry.shape[1:])
            ends[rows.hf] = tuple(map(max, ends.get(rows.hf, shape), shape))
    return ends


def _below(entry: Entry, at: str, hf: str) -> Entry:
    rows = tuple(replace(rows, hf=hf + rows.hf) for rows in entry.rows)
    return replace(entry, name=at + entry.name, rows=rows)
