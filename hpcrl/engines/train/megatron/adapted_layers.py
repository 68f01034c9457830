"""Low-rank adapters (LoRA, arXiv 2106.09685) of a Megatron model's frozen linear layers.

Megatron-Core's layers fuse several of transformers' matrices. Each of these has an adapter of its own, as in peft, so
adapters have the same names, values and sizes as with any other engine. Of a layer whose rows are split over
tensor-parallel ranks, a rank has A and its rows of B; of a layer whose columns are split, its columns of A, and B.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from hpcrl.config import LoRAConfig
from hpcrl.engines.train.dcp import Base
from hpcrl.engines.train.fsdp2.lora import Adapters, drawn_matrix
from hpcrl.engines.train.fsdp2.model import empty_model
from hpcrl.engines.train.fsdp2.weights import fingerprint
from hpcrl.engines.train.megatron.names import Entry, NameTable, shard, shard_shape, shard_slices
from hpcrl.engines.train.megatron.weights import HFWeights, state_of
from hpcrl.models.megatron_entries import copied
from hpcrl.spec.lora import A, B, adapted, is_adapter, layer_of

PLACE = ".adapters."
"""In the name of an adapter's weight, between its layer in Megatron-Core and its own name."""
GATE = ".gate_weight"
"""Ending of the name of the shared experts' gate, a parameter of a module that is not a linear layer."""


class _Matrix(nn.Module):
    """A matrix whose module's forward pass returns it: Megatron's data parallelism waits before a module's forward
    pass until the module's own parameters are gathered."""

    def __init__(self, shape: Sequence[int], like: Tensor):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))

    def forward(self) -> Tensor:
        return self.weight


class _Pair(nn.Module):
    """The adapter of one of transformers' matrices: this rank's parts of A and B.

    Args:
        own: The rows of B whose results belong to this rank's part of the layer, if the rank has all rows of B although
            the layer's rows are split: with more ranks than key heads, they do not split each matrix equally.
        at: The indices of these results in the rank's part.
    """

    def __init__(self, first: _Matrix, second: _Matrix, scale: float, own: Tensor | None, at: Tensor):
        super().__init__()
        self.lora_A, self.lora_B, self.scale, self._own, self.at = first, second, scale, own, at

    def rows(self) -> Tensor:
        """Scale times the rows of B whose results belong to this rank's part of the layer."""
        second = self.lora_B()
        if self._own is not None:  # each rank computes the gradient of its rows
            second = copy_to_tensor_model_parallel_region(second).index_select(0, self._own)
        return self.scale * second


class AdapterPair(nn.Module):
    """The adapters of one Megatron layer, by the last parts of transformers' names.

    Args:
        num_rows: Number of rows of this rank's part of the layer's matrix.
        split: The dimension of the layer's matrix that is split over tensor-parallel ranks.
        sequence_parallel: Whether the layer's input (if its columns are split, its output) has only a part of the
            tokens.
    """

    def __init__(self, pairs: dict[str, _Pair], num_rows: int, split: int | None, sequence_parallel: bool):
        super().__init__()
        for name, pair in pairs.items():
            self.add_module(name, pair)
        self._num_rows, self._split, self._sequence = num_rows, split, sequence_parallel

    @property
    def pairs(self) -> list[_Pair]:
        return [cast(_Pair, pair) for pair in self.children()]

    def _factors(self) -> tuple[Tensor, Tensor]:
        """(the A of all adapters [ranks, in], their B [out, ranks] with scales, and with zeros between them)."""
        first, rows = torch.cat([pair.lora_A() for pair in self.pairs]), torch.cat([pair.at for pair in self.pairs])
        blocks = torch.block_diag(*(pair.rows() for pair in self.pairs))
        return first, first.new_zeros(self._num_rows, len(first)).index_copy(0, rows, blocks)

    def product(self) -> Tensor:
        """The sum of scale * B @ A, of a layer that is not split."""
        first, second = self._factors()
        return second @ first

    def forward(self, x: Tensor) -> Tensor:
        """What the adapters add to the layer's output for the layer's input x."""
        first, second = self._factors()
        narrow = F.linear(x, first)
        if self._split is not None:
            narrow = _EXCHANGES[self._split, self._sequence](narrow)
        return F.linear(narrow, second)


_EXCHANGES: dict[tuple[int, bool], Callable[[Tensor], Tensor]] = {
    (0, False): copy_to_tensor_model_parallel_region,
    (0, True): gather_from_sequence_parallel_region,
    (1, False): reduce_from_tensor_model_parallel_region,
    (1, True): reduce_scatter_to_sequence_parallel_region,
}
"""Between A and B of a layer, by the dimension of its matrix that is split, and whether tokens are split outside it."""


class MegatronAdapters:
    """The adapters in a rank's chunks.

    Attributes:
        layout: Names, initialisation, merging and peft's files, which do not depend on Megatron-Core.
        hf: transformers' model without weights.
        weights: The adapters under transformers' names.
        base: The frozen weights.
    """

    def __init__(self, config: LoRAConfig, model_path: Path, base: HFWeights, chunks: Sequence[Any], seed: int):
        """Freeze the model, whose weights have been read, and add adapters whose product is zero. Collective over the
        engine's ranks. ValueError as Adapters.targets(), or if a stage has no adapter."""
        self.layout, self.hf = Adapters(config), empty_model(model_path, base.dtype)
        self._config, self._on = config, True
        targets = list(self.layout.targets(self.hf)[0])
        self._targets = frozenset(targets)
        self._ranks = base.num_tensor_ranks
        names = NameTable([part for entry in base.table.entries for part in self._entries(entry, base.table)], False)
        found = {layer_of(entry.rows[0].hf) for entry in names.entries}
        assert found == self._targets, f"no Megatron layer has {sorted(self._targets - found)}"
        if idle := set(range(base.num_stages)).difference(map(base.stage_of, names.entries)):
            text = f"no adapter is in pipeline stage {min(idle)}; choose other layers, or use fewer stages"
            raise ValueError(f"trainer.lora.target_modules: {text}")
        self.base = Base(str(model_path), self._fingerprint(base))
        sequence_parallel = bool(chunks[0].config.sequence_parallel)
        for chunk in chunks:
            chunk.requires_grad_(False)
        for chunk, layers in zip(chunks, base.layers_of_chunks, strict=True):
            for name, parameter in [*state_of(chunk)]:
                entry = base.find(base.table, name, layers[0] if layers else 0)
                if parts := [*self._entries(entry, base.table)]:
                    self._adapt(chunk, name, parameter, entry, parts, sequence_parallel)
        self.weights = base.of_adapters(names)
        self._initialise(targets, seed)
        for chunk, layers in zip(chunks, base.layers_of_chunks, strict=True):
            chunk.sharded_state_dict = functools.partial(self._sharded, chunk, layers[0] if layers else 0)

    # ---- names

    def _entries(self, entry: Entry, names: NameTable) -> Iterator[Entry]:
        """A and B of each adapter of a Megatron matrix."""
        for hf in dict.fromkeys(rows.hf for rows in entry.rows):
            module = hf.removesuffix(".weight")
            if module not in self._targets:
                continue
            rank, (rows, columns) = self._config.rank_of(module), names.shapes[hf]
            at = f"{entry.name.rpartition('.')[0]}{PLACE}{module.rpartition('.')[2]}"
            first, second = copied(at + A, module + A, (rank, columns)), copied(at + B, module + B, (rows, rank))
            yield _placed(first, entry, 1 if entry.split == 1 else None)
            yield _placed(second, entry, 0 if entry.split == 0 and self._is_even(entry, hf, rows) else None)

    def _is_even(self, entry: Entry, hf: str, rows: int) -> bool:
        """Whether each tensor-parallel rank has the same number of this matrix's rows, in the ranks' order."""
        size = rows // self._ranks
        for rank in range(self._ranks):
            spans = [part.tensor_slice[0] for part in shard_slices(entry, rank, self._ranks) if part.hf == hf]
            if spans != [(rank * size, (rank + 1) * size)]:
                return False
        return True

    # ---- modules

    def _adapt(
        self, chunk: Any, name: str, matrix: Tensor, entry: Entry, parts: Sequence[Entry], sequence_parallel: bool
    ) -> None:
        """Add the adapters of one of the chunk's matrices."""
        rank = parallel_state.get_tensor_model_parallel_rank() if entry.split is not None else 0
        ranks = self._ranks if entry.split is not None else 1
        pieces = shard_slices(entry, rank, ranks)
        pairs = {}
        for first, second in zip(parts[::2], parts[1::2], strict=True):
            hf, copies = adapted(second.rows[0].hf), entry.split == 0 and second.split is None
            own = [row for part in pieces if part.hf == hf for row in range(*part.tensor_slice[0])]
            at = [row for part in pieces if part.hf == hf for span in part.at for row in range(*span)]
            # With sequence parallelism, each rank has the gradient of its tokens, except for rows of copies.
            down = self._matrix(first, matrix, sequence_parallel)
            up = self._matrix(second, matrix, sequence_parallel and not copies)
            sources, places = (torch.tensor(rows, dtype=torch.int64, device=matrix.device) for rows in (own, at))
            module = layer_of(second.rows[0].hf)
            pair = _Pair(down, up, self._config.scale_of(module), sources if copies else None, places)
            pairs[module.rpartition(".")[2]] = pair
        owner = chunk.get_submodule(name.rpartition(".")[0])
        owner.adapters = AdapterPair(pairs, matrix.shape[0], entry.split, sequence_parallel)
        wrapper = self._with_gate if name.endswith(GATE) else self._forward
        owner.forward = functools.partial(wrapper, owner, owner.forward)

    def _matrix(self, part: Entry, like: Tensor, summed: bool) -> _Matrix:
        """A rank's part of A or B. `summed`: if it is not split, tensor-parallel ranks sum its gradients."""
        made = _Matrix(shard_shape(part, self._ranks), like)
        made.weight.sequence_parallel = summed and part.split is None  # type: ignore[attr-defined]
        return made

    def _forward(self, linear: Any, forward: Callable[..., Any], x: Tensor, *given: Any, **named: Any) -> Any:
        output, bias = forward(x, *given, **named)
        return (output + linear.adapters(_input_of(linear, x)) if self._on else output), bias

    def _with_gate(self, experts: Any, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """The shared experts' forward pass with the sum of gate and adapter, which hides the parameter."""
        if not self._on:
            return forward(*given, **named)
        experts.__dict__["gate_weight"] = experts.gate_weight + experts.adapters.product()
        try:
            return forward(*given, **named)
        finally:
            del experts.__dict__["gate_weight"]

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Context in which the model computes with only the frozen weights."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    # ---- values

    @torch.no_grad()
    def _initialise(self, targets: Sequence[str], seed: int) -> None:
        """Draw all adapters in transformers' order, so that any engine and any split has the same."""
        generator = torch.Generator().manual_seed(seed)
        own = {e.rows[0].hf: e for e in self.weights.table.entries if e.name in self.weights.parameters}
        for module in targets:
            columns = self.hf.get_parameter(f"{module}.weight").shape[1]
            drawn = drawn_matrix(self._config.rank_of(module), columns, generator)
            if (entry := own.get(module + A)) is not None:
                part = shard(entry, {module + A: drawn}, *self.weights.rank_of(entry))
                self.weights.parameters[entry.name].copy_(part)

    def _fingerprint(self, base: HFWeights) -> str:
        """As FSDP2's of the same weights."""
        layout = base.layout(base.dtype)
        held = {whole.name for whole in layout}
        order = [name for name in self.hf.state_dict() if name in held]
        return fingerprint(layout, base.local_shards(), order)

    def _sharded(self, chunk: Any, first_layer: int, *_: Any, **__: Any) -> dict[str, ShardedTensor]:
        """Replaces the chunk's sharded_state_dict(): only adapters, under transformers' names."""
        copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        found = {}
        for name, parameter in chunk.named_parameters():
            if is_adapter(name):
                entry = self.weights.find(self.weights.table, name, first_layer)
                rank, ranks = self.weights.rank_of(entry)
                spans = [(entry.split, rank, ranks)] if entry.split is not None else []
                replica = (0, 0 if spans else rank, copy)
                found[name] = ShardedTensor.from_rank_offsets(entry.rows[0].hf, parameter, *spans, replica_id=replica)
        return found

    def merged(self, named: Iterator[tuple[str, Tensor]], whole: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The tensors with their adapters, which `whole` has by name, added."""
        for name, tensor in named:
            first = name.removesuffix(".weight") + A
            if first in whole:
                second = whole[name.removesuffix(".weight") + B]
                tensor = self.layout.merge(self.hf, first, tensor, whole[first], second)
            yield name, tensor


def _placed(adapter: Entry, entry: Entry, split: int | None) -> Entry:
    """An adapter's matrix on the stage of the matrix that it adapts."""
    return dataclasses.replace(adapter, layer=entry.layer, split=split)


def _input_of(linear: Any, x: Tensor) -> Tensor:
    """The input of a layer's matrix: after the norm, if Transformer Engine's layer has one."""
    scale = getattr(linear, "layer_norm_weight", None)
    if scale is None:
        return x
    scale = scale.float() + 1.0 if linear.zero_centered_gamma else scale.float()
    return F.rms_norm(x.float(), x.shape[-1:], scale, linear.eps).to(x.dtype)
