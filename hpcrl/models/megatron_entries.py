"""Megatron-Core's tensors and the HF tensors that they are made of: the entries of a family's table.

A Megatron tensor is assembled from rows of HF tensors: query, key and value rows group by group, gate above up, or
unchanged rows of one HF tensor. Written against megatron-core 0.16.1 and transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

LayerSpec = Literal["local", "copied", "fused"]
"""local: Megatron's own layers. copied: the same, but every tensor parallel rank has a copy of the matrices that
compute MLA's latents. fused: Transformer Engine's layers, with these copies and with norms fused into the next linear
layer."""

EntryPlace = Literal["embedding", "layer", "norm", "head"]


@dataclass(frozen=True)
class EntryRows:
    """`count` rows of a Megatron tensor from row `at`, taken from an HF tensor from row `first`. expert: index in the
    first dimension of an HF tensor with all experts of a layer (transformers in memory)."""

    hf: str
    first: int
    at: int
    count: int
    expert: int | None = None


@dataclass(frozen=True)
class Entry:
    """A tensor of GPTModel, not split by tensor parallelism.

    Attributes:
        name: as in GPTModel's state dict if one rank had all layers and all experts.
        shape: with the padded vocabulary, whose last rows are in no HF tensor.
        place, layer, expert: which ranks hold it.
        split: the dimension that tensor parallelism splits (expert tensor parallelism, for an expert); None: each rank
            has a copy.
        parts: equal parts of this dimension, each of which is split (2: gate and up).
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
        """Number of padding rows at the end, which no HF tensor has."""
        return self.shape[0] - sum(rows.count for rows in self.rows)


class MegatronLayers(Protocol):
    """The Megatron-Core layers of one config.json's model."""

    hidden: int
    vocabulary: int
    num_layers: int
    tied: bool

    def attention(self, layers: LayerSpec) -> Iterator[Entry]:
        """The tensors of a layer's attention and of the norm before it; names without the layer."""

    def mlp(self, layer: int, fused: bool, stacked: bool) -> Iterator[Entry]:
        """The tensors of a layer's MLP or experts and of the norm before them. fused: Transformer Engine's layers;
        stacked: HF names of experts as in transformers' memory."""


def copied(
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


def gated(name: str, gate: str, up: str, inner: int, rest: Sequence[int]) -> Entry:
    """A Megatron tensor with the gate projection's rows above the up projection's."""
    rows = (EntryRows(gate, 0, 0, inner), EntryRows(up, 0, inner, inner))
    return Entry(name, (2 * inner, *rest), rows, "layer", split=0, parts=2)


def dense(at: str, hf: str, hidden: int, inner: int, bias: bool = False) -> Iterator[Entry]:
    """A gated MLP."""
    for which, rest in (("weight", (hidden,)), *((("bias", ()),) if bias else ())):
        yield gated(f"{at}linear_fc1.{which}", f"{hf}gate_proj.{which}", f"{hf}up_proj.{which}", inner, rest)
    yield copied(f"{at}linear_fc2.weight", f"{hf}down_proj.weight", (hidden, inner), split=1)
    if bias:
        yield copied(f"{at}linear_fc2.bias", f"{hf}down_proj.bias", (hidden,))


def experts(count: int, hidden: int, inner: int, fused: bool, stacked: bool) -> Iterator[Entry]:
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
            both = gated(fc1, f"{hf}gate_proj.weight", f"{hf}up_proj.weight", inner, (hidden,))
            yield replace(both, expert=expert)
            yield replace(copied(fc2, f"{hf}down_proj.weight", (hidden, inner), split=1), expert=expert)
