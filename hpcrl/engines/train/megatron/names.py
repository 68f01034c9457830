"""Megatron-Core's tensors and the HF tensors that they consist of, from only a config.json, without Megatron or model.

A Megatron tensor consists of rows of HF tensors: query, key and value rows group by group, gate rows before up rows, or
the rows of one HF tensor. Tensor parallelism splits it again. Both are described here by tables of rows, which loading,
publishing, exporting and converting use. Written for megatron-core 0.16.1 and transformers 5.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hpcrl.models.families import MEGATRON, family_of, read_shape, with_decoder
from hpcrl.models.megatron_entries import Entry, EntryRows, LayerSpec, copied
from hpcrl.spec.weight_layout import TensorSlice

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
VALUE_HEAD = "score"
"""A critic's or reward model's head in transformers' models for token and for sequence classification."""
_LIVE_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_LIVE_EXPERT = re.compile(r"(.*\.mlp\.experts\.)local_experts\.(\d+)(\..*)")
_GROUPED_EXPERT = re.compile(r"(.*\.mlp\.experts)(\.linear_fc[12]\.)(weight|bias)(\d+)")


@dataclass(frozen=True)
class ShardSlice:
    """A slice of an HF tensor in a rank's shard.

    Attributes:
        at: The ranges of the shard's rows, which are concatenated.
        step: Number of equally long ranges whose rows alternate in the HF tensor; otherwise 1.
        transposed: The HF matrix is transposed.
    """

    hf: str
    tensor_slice: TensorSlice
    at: tuple[tuple[int, int], ...]
    step: int = 1
    transposed: bool = False

    def rows(self, values: Tensor, rest: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
        """(first row, last row, rows [n, *rest]) of the shard for each range, from the slice's values."""
        values = values.reshape(*rest, -1).t() if self.transposed else values.reshape(-1, *rest)
        if self.step > 1:
            values = values.unflatten(0, (-1, self.step)).transpose(0, 1).flatten(0, 1)
        sizes = [last - first for first, last in self.at]
        for (first, last), part in zip(self.at, values.split(sizes), strict=True):
            yield first, last, part

    def values(self, part: Tensor) -> Tensor:
        """The inverse of rows(): the slice's values from a shard. A view if they are contiguous in the shard."""
        pieces = [part[first:last] for first, last in self.at]
        values = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if self.step > 1:
            values = values.unflatten(0, (self.step, -1)).transpose(0, 1).flatten(0, 1)
        if self.transposed:
            values = values.t().contiguous()
        return values.view(tuple(last - first for first, last in self.tensor_slice))


class NameTable:
    """A model's tensors in layer order. `shapes` maps HF names to shapes; `tied`: the head is the embedding."""

    def __init__(self, entries: Sequence[Entry], tied: bool):
        self.entries, self.tied = tuple(entries), tied
        self.shapes = _hf_shapes(self.entries)
        self._by_name = {entry.name: entry for entry in self.entries}

    def find(self, name: str, first_layer: int = 0, first_expert: int = 0) -> Entry:
        """The entry for a name in a rank's state dict; for a tied model's head, the embedding. `first_layer` is the
        first layer of the rank's model chunk, `first_expert` the rank's first expert. ValueError without an entry."""
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
    bias: bool = True,
    heads: int = 1,
) -> NameTable:
    """The table for a config.json's model.

    Args:
        padded_vocabulary: Number of rows in Megatron's embedding; by default without padding.
        stacked: Use HF names as in transformers' memory, where one tensor has all experts of a layer, instead of names
            as in files.
        values: Use a critic's head instead of the vocabulary projection.
        bias: Whether a critic's head has a bias; a reward model's has none.
        heads: Number of a reward model's heads.

    ValueError if the family has no table or a size is missing.
    """
    name = config.get("model_type")
    family = family_of(name).megatron
    if family is None:
        raise ValueError(f"model_type {name!r} has no table of Megatron's names ({', '.join(MEGATRON)} have)")
    model = family.layers(config, with_decoder(read_shape(config)))
    vocabulary, fused = model.vocabulary, layers == "fused"
    padded = vocabulary if padded_vocabulary is None else padded_vocabulary
    if padded < vocabulary:
        raise ValueError(f"a padded vocabulary of {padded} rows is smaller than vocab_size={vocabulary} in config.json")
    around = (padded, model.hidden)
    found = [copied(EMBEDDING, "model.embed_tokens.weight", around, "embedding", split=0, count=vocabulary)]
    for layer in range(model.num_layers):
        at, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        inside = [*model.attention(layer, layers), *model.mlp(layer, fused, stacked)]
        found += [replace(_below(entry, at, hf), layer=layer) for entry in inside]
    found.append(copied("decoder.final_layernorm.weight", "model.norm.weight", around[1:], "norm"))
    if values:
        found.append(copied(HEAD, f"{VALUE_HEAD}.weight", (heads, model.hidden), "head"))
        found += [copied("output_layer.bias", f"{VALUE_HEAD}.bias", (1,), "head")] if bias else []
    elif not model.tied:
        found.append(copied(HEAD, "lm_head.weight", around, "head", split=0, count=vocabulary))
    return NameTable(found, model.tied and not values)


def shard_shape(entry: Entry, num_ranks: int) -> tuple[int, ...]:
    """The shape of one tensor parallel rank's part. ValueError if the tensor cannot be split over the ranks."""
    if entry.split is None:
        return entry.shape
    size = entry.shape[entry.split]
    if size % (entry.parts * num_ranks):
        unit = f"{entry.parts} x {num_ranks}" if entry.parts > 1 else f"{num_ranks}"
        raise ValueError(f"{entry.name} {list(entry.shape)}: {size} cannot be divided by {unit} tensor parallel ranks")
    return (*entry.shape[: entry.split], size // num_ranks, *entry.shape[entry.split + 1 :])


def shard_slices(entry: Entry, rank: int = 0, num_ranks: int = 1) -> list[ShardSlice]:
    """The slices of HF tensors in a tensor parallel rank's shard, neighbouring rows in one slice; without padding.

    A rank has one slice of each tensor, except for `stacked` gate and up, and for queries if there are more ranks than
    key heads.
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
                start = rows.first + (low - rows.at) * rows.step
                here = replace(rows, first=start, at=at + low - first, count=high - low)
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
    """A tensor-parallel rank's part of a Megatron tensor (with one rank, the full tensor), on the CPU, with zeros as
    padding. `tensors` maps HF names to tensors or to objects that return a tensor for `[rows, columns]`, such as
    safetensors' get_slice(), of which only the rank's part is read. ValueError if a tensor is missing."""
    result: Tensor | None = None
    for part in shard_slices(entry, rank, num_ranks):
        if part.hf not in tensors:
            raise ValueError(f"the HF tensor {part.hf} of Megatron's {entry.name} is missing")
        read = tensors[part.hf][tuple(slice(*span) for span in part.tensor_slice)]
        if result is None:
            result = torch.zeros(shard_shape(entry, num_ranks), dtype=dtype or read.dtype)
        for first, last, rows in part.rows(read, result.shape[1:]):
            result[first:last] = rows
    if result is None:  # only padding
        if dtype is None:
            dtype = tensors[entry.rows[0].hf][(slice(0, 1),) * len(entry.shape)].dtype
        result = torch.zeros(shard_shape(entry, num_ranks), dtype=dtype)
    return result


def parts(entry: Entry, part: Tensor, rank: int = 0, num_ranks: int = 1) -> Iterator[tuple[str, TensorSlice, Tensor]]:
    """The inverse of shard(): (HF name, slice, values) for each ShardSlice of a rank's shard. Values that are
    contiguous in the shard are views, others are copies. ValueError if the shard's shape is not the rank's."""
    if tuple(part.shape) != (shape := shard_shape(entry, num_ranks)):
        raise ValueError(f"{entry.name}: a shard of shape {list(part.shape)}, config.json requires {list(shape)}")
    for piece in shard_slices(entry, rank, num_ranks):
        yield piece.hf, piece.tensor_slice, piece.values(part)


def _row_spans(entry: Entry, rank: int, num_ranks: int) -> list[tuple[int, int]]:
    """Ranges of the full tensor's rows that are in a rank's shard, in shard order."""
    if entry.split != 0 or num_ranks == 1:
        return [(0, entry.shape[0])]
    part = entry.shape[0] // entry.parts
    size = part // num_ranks
    return [(number * part + rank * size, number * part + (rank + 1) * size) for number in range(entry.parts)]


def _joined(pieces: Sequence[EntryRows], columns: Sequence[tuple[int, int]]) -> Iterator[ShardSlice]:
    """The slices for the pieces of one HF tensor, sorted by its rows."""
    runs: list[list[EntryRows]] = []
    for rows in pieces:
        if runs and _continues(runs[-1], rows):
            runs[-1].append(rows)
        else:
            runs.append([rows])
    for run in runs:
        begin, step = run[0], run[0].step
        assert step in (1, len(run)), "a rank has equally many of the rows that alternate"
        leading = () if begin.expert is None else ((begin.expert, begin.expert + 1),)
        span = (begin.first, begin.first + sum(rows.count for rows in run))
        box = (*columns, span) if begin.transposed else (span, *columns)
        at = tuple((rows.at, rows.at + rows.count) for rows in run)
        yield ShardSlice(begin.hf, (*leading, *box), at, step, begin.transposed and bool(columns))


def _continues(run: Sequence[EntryRows], rows: EntryRows) -> bool:
    """Whether these rows of the HF tensor follow the run's, or alternate with them."""
    if rows.step > 1:
        return len(run) < rows.step and run[-1].first + 1 == rows.first and run[-1].count == rows.count
    return run[-1].first + run[-1].count == rows.first


def _hf_shapes(entries: Sequence[Entry]) -> dict[str, tuple[int, ...]]:
    ends: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        for rows in entry.rows:
            leading = () if rows.expert is None else (rows.expert + 1,)
            size, rest = rows.first + (rows.count - 1) * rows.step + 1, entry.shape[1:]
            shape = (*leading, *rest, size) if rows.transposed else (*leading, size, *rest)
            ends[rows.hf] = tuple(map(max, ends.get(rows.hf, shape), shape))
    return ends


def _below(entry: Entry, at: str, hf: str) -> Entry:
    rows = tuple(replace(rows, hf=hf + rows.hf) for rows in entry.rows)
    return replace(entry, name=at + entry.name, rows=rows)
