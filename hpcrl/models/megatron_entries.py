"""Megatron-Core's tensors and the HF tensors that they consist of: the entries of a family's table.

A Megatron tensor consists of rows of HF tensors: query, key and value rows group by group, gate rows before up rows, or
the rows of one HF tensor. Written for megatron-core 0.16.1 and transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from hpcrl.models.shape import FILES, ExpertFiles

LayerSpec = Literal["local", "copied", "fused"]
"""local: Megatron's own layers. copied: Megatron's own layers, but every tensor-parallel rank has a copy of the
matrices that compute MLA's latents. fused: Transformer Engine's layers, with such copies, and with norms fused into the
next linear layer."""

EntryPlace = Literal["embedding", "layer", "norm", "head"]


@dataclass(frozen=True)
class EntryRows:
    """`count` rows of a Megatron tensor from row `at` on, which are rows of an HF tensor.

    Attributes:
        first, step: These are the rows `first`, `first + step`, ... of the HF tensor. With a step of 2, gate and up
            rows alternate.
        expert: The index in the first dimension if the HF tensor has all experts of a layer, as in transformers'
            memory.
        transposed: The HF matrix is transposed, so these are its columns.
    """

    hf: str
    first: int
    at: int
    count: int
    expert: int | None = None
    step: int = 1
    transposed: bool = False


@dataclass(frozen=True)
class Entry:
    """A tensor of GPTModel, not split by tensor parallelism.

    Attributes:
        name: The name in GPTModel's state dict if one rank had all layers and all experts.
        shape: The shape with the padded vocabulary, whose last rows are in no HF tensor.
        place, layer, expert: These define which ranks hold the tensor.
        split: The dimension that tensor parallelism splits, or expert tensor parallelism for an expert. None if each
            rank has a copy.
        parts: Number of equal parts of this dimension that are split separately, such as 2 for gate and up.
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
        """Number of padding rows at the end, which are in no HF tensor."""
        return self.shape[0] - sum(rows.count for rows in self.rows)


class MegatronLayers(Protocol):
    """The Megatron-Core layers for the model of a config.json."""

    hidden: int
    vocabulary: int
    num_layers: int
    tied: bool

    def attention(self, layer: int, layers: LayerSpec) -> Iterator[Entry]:
        """The tensors of a layer's attention and of the norm before it. Names do not contain the layer."""

    def mlp(self, layer: int, fused: bool, stacked: bool) -> Iterator[Entry]:
        """The tensors of a layer's MLP or experts and of the norm before them. `fused` means Transformer Engine's
        layers; `stacked` means HF names as in transformers' memory, where one tensor has all experts of a layer."""


def copied(
    name: str,
    hf: str,
    shape: Sequence[int],
    place: EntryPlace = "layer",
    split: int | None = None,
    count: int | None = None,
) -> Entry:
    """A Megatron tensor equal to an HF tensor; `count` is the number of rows without padding."""
    rows = (EntryRows(hf, 0, 0, shape[0] if count is None else count),)
    return Entry(name, tuple(shape), rows, place, split=split)


def gated(name: str, gate: str, up: str, inner: int, rest: Sequence[int]) -> Entry:
    """A Megatron tensor with the gate projection's rows before the up projection's."""
    rows = (EntryRows(gate, 0, 0, inner), EntryRows(up, 0, inner, inner))
    return Entry(name, (2 * inner, *rest), rows, "layer", split=0, parts=2)


def dense(at: str, hf: str, hidden: int, inner: int, bias: bool = False) -> Iterator[Entry]:
    """A gated MLP."""
    for which, rest in (("weight", (hidden,)), *((("bias", ()),) if bias else ())):
        yield gated(f"{at}linear_fc1.{which}", f"{hf}gate_proj.{which}", f"{hf}up_proj.{which}", inner, rest)
    yield copied(f"{at}linear_fc2.weight", f"{hf}down_proj.weight", (hidden, inner), split=1)
    if bias:
        yield copied(f"{at}linear_fc2.bias", f"{hf}down_proj.bias", (hidden,))


def expert_name(expert: int, matrix: str, which: str, fused: bool) -> str:
    """Megatron's name for an expert's linear_fc1 or linear_fc2 (`matrix`), for its weight or its bias (`which`)."""
    if fused:
        return f"mlp.experts.{matrix}.{which}{expert}"
    return f"mlp.experts.local_experts.{expert}.{matrix}.{which}"


def routed(
    count: int, hidden: int, inner: int, fused: bool, stacked: bool, files: ExpertFiles = FILES
) -> Iterator[Entry]:
    """The router, and all experts."""
    yield copied("mlp.router.weight", f"{(FILES if stacked else files).at}gate.weight", (count, hidden))
    for expert in range(count):
        fc1, fc2 = (expert_name(expert, matrix, "weight", fused) for matrix in ("linear_fc1", "linear_fc2"))
        if stacked:
            gate_up = (EntryRows("mlp.experts.gate_up_proj", 0, 0, 2 * inner, expert),)
            down = (EntryRows("mlp.experts.down_proj", 0, 0, hidden, expert),)
            yield Entry(fc1, (2 * inner, hidden), gate_up, "layer", expert=expert, split=0, parts=2)
            yield Entry(fc2, (hidden, inner), down, "layer", expert=expert, split=1)
        else:
            hf = f"{files.at}experts.{expert}."
            both = gated(fc1, f"{hf}{files.gate}.weight", f"{hf}{files.up}.weight", inner, (hidden,))
            yield replace(both, expert=expert)
            yield replace(copied(fc2, f"{hf}{files.down}.weight", (hidden, inner), split=1), expert=expert)
