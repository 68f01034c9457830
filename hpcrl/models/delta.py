"""Layers that mix tokens by the gated delta rule (arXiv 2412.06464): their sizes and tensors in Megatron-Core."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hpcrl.models.megatron_entries import Entry, EntryRows, LayerSpec, copied
from hpcrl.models.qwen2_moe import GatedSharedLayers
from hpcrl.models.shape import ModelShape, Parameter, ParameterSplit, size

if TYPE_CHECKING:
    import torch

MIXER = ".linear_attn."
"""In transformers' names of such a layer's tensors."""


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a layer's mixer. A key head has a query, a key and `group` value heads."""

    key_heads: int
    group: int
    key_dim: int
    value_dim: int
    kernel: int  # width of the convolution

    @property
    def num_heads(self) -> int:
        """Number of value heads."""
        return self.key_heads * self.group

    @property
    def keys(self) -> int:
        """Width of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values, and of the output."""
        return self.num_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Width of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def projected(self) -> int:
        """Width of the input projection: the convolution's, the output's gates, and two factors per head."""
        return self.convolved + self.values + 2 * self.num_heads

    @property
    def of_key_head(self) -> tuple[int, int, int, int, int, int]:
        """Widths of a key head's query, key, values, gates, and the two factors of its value heads."""
        values = self.group * self.value_dim
        return self.key_dim, self.key_dim, values, values, self.group, self.group

    def joint_order(self) -> tuple[list[int], list[int]]:
        """Where files with joint projections have the columns of `projected`: the rows of in_proj_qkvz, which has
        queries, keys, values and gates by key head, and of in_proj_ba, which has the factors by key head."""
        widths = self.of_key_head
        return _by_part(self.key_heads, widths[:4]), _by_part(self.key_heads, widths[4:])

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a sequence's state in one layer: the recurrent state in fp32, and the convolution's last inputs."""
        recurrent = self.keys * self.group * self.value_dim * 4
        return recurrent + self.convolved * (self.kernel - 1) * dtype.itemsize


def _by_part(groups: int, widths: Sequence[int]) -> list[int]:
    """Indices that order rows by part, if they are ordered by group, with parts of these widths in each."""
    total = sum(widths)
    starts = accumulate(widths, initial=0)
    return [
        group * total + start + row
        for start, width in zip(starts, widths, strict=False)
        for group in range(groups)
        for row in range(width)
    ]


def delta_layers(shape: ModelShape) -> frozenset[int]:
    """The layers with such a mixer."""
    return frozenset(p.layer for p in shape.parameters if p.layer is not None and MIXER in p.name)


def delta_sizes(shape: ModelShape) -> DeltaSizes | None:
    """Sizes of these layers, with the defaults of transformers 5 for missing keys; None for a model without them.
    CannotPlanError for a size that is not a whole number above 0."""
    if shape.source is None or not delta_layers(shape):
        return None
    config: Mapping[str, Any] = json.loads(shape.source.config)
    keys = size(config, "linear_num_key_heads", 16)
    return DeltaSizes(
        key_heads=keys,
        group=size(config, "linear_num_value_heads", 32) // keys,
        key_dim=size(config, "linear_key_head_dim", 128),
        value_dim=size(config, "linear_value_head_dim", 128),
        kernel=size(config, "linear_conv_kernel_dim", 4),
    )


def split_by_heads(shape: ModelShape) -> ModelShape:
    """With these layers' parameters split as Megatron-Core's ranks do, by heads; other engines have them whole."""
    if not delta_layers(shape):
        return shape
    return replace(shape, parameters=tuple(replace(p, split=_split(p)) for p in shape.parameters))


def _split(parameter: Parameter) -> ParameterSplit:
    if MIXER in parameter.name and parameter.name.endswith(("conv1d.weight", "A_log", "dt_bias")):
        return "column"
    return "row" if parameter.name.endswith(f"{MIXER}out_proj.weight") else parameter.split


class DeltaLayers(GatedSharedLayers):
    """Layers with a gated delta rule and layers with gated attention; with experts or without. A mixer's projection and
    convolution have the rows of a key head and its value heads next to each other, so ranks split them like
    attention's."""

    def __init__(self, config: Mapping[str, Any], shape: ModelShape):
        super().__init__(config, shape)
        self._recurrent, self._sizes = delta_layers(shape), delta_sizes(shape)

    def attention(self, layer: int, layers: LayerSpec) -> Iterator[Entry]:
        """See MegatronLayers."""
        if layer not in self._recurrent:
            yield from super().attention(layer, layers)
            return
        assert self._sizes is not None
        yield copied("input_layernorm.weight", "input_layernorm.weight", (self.hidden,))
        yield from _mixer(self._sizes, self.hidden, self._shape.decoder.separate_delta)


def _mixer(sizes: DeltaSizes, hidden: int, separate: bool) -> Iterator[Entry]:
    at, hf = "self_attention.", "linear_attn."
    queries, keys, values, gates, b, a = sizes.of_key_head
    convolved = ((0, queries), (sizes.keys, keys), (2 * sizes.keys, values))
    if separate:
        of_input = [("in_proj_qkv.weight", *each) for each in convolved]
        of_input += [("in_proj_z.weight", 0, gates), ("in_proj_b.weight", 0, b), ("in_proj_a.weight", 0, a)]
    else:
        of_input = [("in_proj_qkvz.weight", 0, queries + keys + values + gates), ("in_proj_ba.weight", 0, b + a)]
    entry = functools.partial(_by_key_head, sizes.key_heads, hf)
    yield entry(at + "in_proj.weight", of_input, (hidden,))
    yield entry(at + "conv1d.weight", [("conv1d.weight", *each) for each in convolved], (1, sizes.kernel))
    for name in ("dt_bias", "A_log"):
        yield copied(at + name, hf + name, (sizes.num_heads,), split=0)
    yield copied(at + "norm.weight", hf + "norm.weight", (sizes.value_dim,))
    yield copied(at + "out_proj.weight", hf + "out_proj.weight", (hidden, sizes.values), split=1)


def _by_key_head(
    heads: int, at_hf: str, name: str, pieces: Sequence[tuple[str, int, int]], rest: Sequence[int]
) -> Entry:
    """A Megatron tensor with rows of several HF tensors below `at_hf`, key head by key head. A piece is (HF tensor, row
    of the first head, number of rows per head)."""
    rows, at = [], 0
    for head in range(heads):
        for hf, first, count in pieces:
            rows.append(EntryRows(at_hf + hf, first + head * count, at, count))
            at += count
    return Entry(name, (at, *rest), tuple(rows), "layer", split=0)
