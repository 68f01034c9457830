"""A Megatron model's weights under HF names: read slice by slice, gathered tensor by tensor, or as ranks' shards."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpcrl.engines.hf_folder import INDEX, SINGLE
from hpcrl.engines.train.megatron.gpt_model import Description
from hpcrl.engines.train.megatron.names import HEAD, Entry, LayerSpec, NameTable, parts, shard, shard_slices, table
from hpcrl.engines.train.megatron.parallel import padded_vocabulary, split_layers
from hpcrl.engines.train.megatron.spec import MegatronConfig
from hpcrl.engines.train.router_keys import BIAS
from hpcrl.planner.adapters import parts as parts_of
from hpcrl.spec.freeze import frozen
from hpcrl.spec.lora import is_adapter
from hpcrl.spec.weight_layout import TensorShards, TensorSlice

EXPERT_BIAS = "router.expert_bias"
"""Ending of the name of a router's bias, which is fp32, whatever dtype the parameters have."""


def state_of(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A chunk's parameters, and its routers' biases, which no optimizer updates."""
    yield from chunk.named_parameters()
    yield from ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(EXPERT_BIAS))


class TensorFiles(Mapping[str, Any]):
    """An HF folder's tensors by name, which are read when they are indexed. ValueError if the folder has no safetensors
    files, or a file cannot be read."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._open: dict[str, Any] = {}
        try:
            if (folder / INDEX).is_file():
                self._file_of: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
            elif (folder / SINGLE).is_file():
                self._file_of = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
            else:
                raise ValueError(f"model.path {folder}: no {SINGLE} or {INDEX}, which trainer.engine=megatron reads")
        except (KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"model.path {folder}: {INDEX} lists no tensors: {error}") from error

    def __getitem__(self, name: str) -> Any:
        return self._file(self._file_of[name]).get_slice(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self._folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                text = " ".join(str(error).split())[:300]
                raise ValueError(f"model.path {self._folder}: {name} cannot be read: {text}") from error
        return self._open[name]


@dataclass(frozen=True)
class Coordinates:
    """A rank's coordinates in its pipeline stage, in Megatron's rank order."""

    stage: int
    tensor: int
    expert: int
    expert_tensor: int

    @classmethod
    def of(cls, rank: int, num_ranks: int, megatron: MegatronConfig) -> Coordinates:
        stage, inside = divmod(rank, num_ranks // megatron.pipeline_parallel)
        expert, within = divmod(inside, megatron.expert_tensor_parallel)
        return cls(stage, inside % megatron.tensor_parallel, expert % megatron.expert_parallel, within)


class HFWeights:
    """The parameters of this rank's chunks, and how all ranks split the model's parameters. Names are as in
    transformers' memory, where a layer's experts are one tensor."""

    def __init__(
        self,
        model: Description,
        megatron: MegatronConfig,
        chunks: Sequence[GPTModel],
        num_ranks: int,
        values: bool = False,
        adapters: NameTable | None = None,
        bias: bool = True,
        heads: int = 1,
    ):
        """`values` means that the model is a critic, whose head is zero if the folder has none, with a `bias` or
        without, or a reward model with so many `heads`. `adapters` is the table of the adapters in the chunks, to which
        all methods then refer instead of the model's own weights."""
        self._values, self._adapters, self._bias, self._heads = values, adapters, bias, heads
        self._megatron, self._chunks, self._num_ranks = megatron, chunks, num_ranks
        self._description = model
        self._stages = split_layers(model.shape.num_layers, megatron) or []
        self.table = self._table(stacked=True)
        self._place = Coordinates.of(dist.get_rank(), num_ranks, megatron)
        own = Coordinates(
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
        assert own == self._place, f"Megatron-Core's order of ranks gives {own}, not {self._place}"
        self.parameters = dict(self._own_parameters())
        first = next(iter(self.parameters.values()))
        self.dtype, self.device = first.dtype, first.device
        self._layers = {layer: stage for stage, chunks in enumerate(self._stages) for c in chunks for layer in c}
        self._frozen: frozenset[str] = frozenset()

    def of_adapters(self, names: NameTable) -> HFWeights:
        """The adapters in the chunks, which have this table."""
        return HFWeights(self._description, self._megatron, self._chunks, self._num_ranks, self._values, names)

    @property
    def num_tensor_ranks(self) -> int:
        """Number of tensor-parallel ranks."""
        return self._megatron.tensor_parallel

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self._stages)

    @property
    def layers_of_chunks(self) -> tuple[tuple[int, ...], ...]:
        """The layers of this rank's chunks."""
        return self._stages[self._place.stage]

    def _table(self, stacked: bool) -> NameTable:
        if self._adapters is not None:
            return self._adapters
        layers: LayerSpec = "fused" if torch.cuda.is_available() else "copied"
        padded = padded_vocabulary(self._description.shape.vocab_size, self._megatron)
        return table(self._description.json, layers, padded, stacked, self._values, self._bias, self._heads)

    def _own_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Each chunk's parameters under the full model's names, without the second copy of a tied embedding."""
        for chunk, layers in zip(self._chunks, self.layers_of_chunks, strict=True):
            for name, parameter in state_of(chunk):
                if is_adapter(name) != (self._adapters is not None):
                    continue
                entry = self.find(self.table, name, layers[0] if layers else 0)
                differs = entry.split is not None or entry.expert is not None
                if differs and not hasattr(parameter, "tensor_model_parallel"):
                    # Needed for the gradient norm; Megatron sets these attributes only where it initialises weights,
                    # and takes experts' biases for copies.
                    set_tensor_model_parallel_attributes(parameter, True, entry.split or 0, 1)
                if entry.expert is not None:  # Megatron treats experts that no ranks split as copies
                    parameter.allreduce = False  # type: ignore[attr-defined]
                    parameter.sequence_parallel = False  # type: ignore[attr-defined]
                if not (self.table.tied and name == HEAD):
                    yield entry.name, parameter

    def find(self, names: NameTable, name: str, first_layer: int) -> Entry:
        """The entry for the name of a parameter in one of this rank's chunks, whose first layer is given."""
        experts = self._description.shape.num_experts // self._megatron.expert_parallel
        return names.find(name, first_layer, self._place.expert * experts)

    def rank_of(self, entry: Entry, place: Coordinates | None = None) -> tuple[int, int]:
        """(rank, number of ranks) among the ranks that split a tensor."""
        place = place or self._place
        if entry.expert is not None:
            return place.expert_tensor, self._megatron.expert_tensor_parallel
        return place.tensor, self._megatron.tensor_parallel

    def freeze(self, entries: Sequence[str]) -> None:
        """Unset requires_grad for the parameters that the entries of trainer.freeze select. ValueError if the entries
        select none, all, or a part of a Megatron tensor, or leave this rank nothing to train."""
        shape, trained = self._description.shape, 0
        self._frozen = frozenset(frozen(entries, parts_of(shape), shape.family))
        for chunk, layers in zip(self._chunks, self.layers_of_chunks, strict=True):
            for name, parameter in chunk.named_parameters():
                entry = self.find(self.table, name, layers[0] if layers else 0)
                joined = {rows.hf for rows in entry.rows}
                if left := sorted(joined - self._frozen):
                    trained += 1
                else:
                    parameter.requires_grad_(False)
                if left and len(left) < len(joined):
                    text = f"{', '.join(sorted(joined))} are one tensor in Megatron-Core; freeze all of them or none"
                    raise ValueError(f"trainer.freeze: {text}")
        if not trained:
            text = f"leaves pipeline stage {self._place.stage} nothing to train; freeze less, or use fewer stages"
            raise ValueError(f"trainer.freeze: {text}")

    @property
    def routers_frozen(self) -> bool:
        """Whether freeze() has frozen the routers of all layers."""
        parts = parts_of(self._description.shape).items()
        routers = {name for name, part in parts if part == "router" and not name.endswith(BIAS)}
        return bool(routers) and routers <= self._frozen

    # ---- reading

    def held(self) -> Iterator[tuple[Entry, Tensor]]:
        """This rank's parameters and routers' biases, with the second copy of a tied embedding; or its adapters."""
        for chunk, layers in zip(self._chunks, self.layers_of_chunks, strict=True):
            for name, tensor in state_of(chunk):
                if is_adapter(name) == (self._adapters is not None):
                    yield self.find(self.table, name, layers[0] if layers else 0), tensor

    @torch.no_grad()
    def read(self, folder: Path) -> None:
        """Fill the parameters from an HF folder. Each rank reads its own shards. ValueError names the first tensor that
        is missing or has another shape."""
        files = TensorFiles(folder)
        # Files may stack the experts of MTP layers, which are not read here, and not the policy's.
        stacked = any(name.endswith("mlp.experts.gate_up_proj") and name in files for name in self.table.shapes)
        names = self._table(stacked)
        for chunk, layers in zip(self._chunks, self.layers_of_chunks, strict=True):
            for name, parameter in state_of(chunk):
                entry = self.find(names, name, layers[0] if layers else 0)
                if self._values and entry.place == "head" and entry.rows[0].hf not in files:
                    parameter.zero_()
                    continue
                for rows in entry.rows:
                    self._check(folder, files, rows.hf, names.shapes[rows.hf])
                parameter.copy_(shard(entry, files, *self.rank_of(entry)))

    @staticmethod
    def _check(folder: Path, files: TensorFiles, name: str, shape: tuple[int, ...]) -> None:
        if name not in files:
            raise ValueError(f"model.path {folder}: the weights lack {name}")
        if (found := tuple(files[name].get_shape())) != shape:
            raise ValueError(f"model.path {folder}: {name} has shape {list(found)}, config.json requires {list(shape)}")

    # ---- whole tensors

    def full_tensors(
        self, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
    ) -> Iterator[tuple[str, Tensor]]:
        """Unsharded copies, under HF names, of tensors with the names and parts of some or all of this rank's
        parameters; each in the type of dtypes, converted before it is exchanged. Collective over a pipeline stage:
        every rank must exhaust it."""
        for run in self._runs(self._place.stage):
            own = [entry for entry in run if entry.name in tensors]
            whole = [self._gathered(entry, tensors[entry.name], dtypes) for entry in own]
            if not own:
                continue
            named = self._hf(own[0], whole[0]) if own[0].expert is None else self._stacked(own, whole)
            for name, tensor in named:
                yield name, tensor.to(dtypes.get(name, tensor.dtype))

    def to_files(self) -> Iterator[tuple[str, Tensor]]:
        """On rank 0, unsharded copies of all stages' tensors under the names in files, where each expert has separate
        matrices; nothing on other ranks. Collective over the engine's ranks: every rank must exhaust it."""
        names, rank = self._table(stacked=False), dist.get_rank()
        by_expert = {entry.name: entry for entry in names.entries}
        per_stage = self._num_ranks // len(self._stages)
        for stage in range(len(self._stages)):
            sender = stage * per_stage
            own = self.full_tensors(self.parameters, {}) if stage == self._place.stage else None
            for run in self._runs(stage):
                in_files = {
                    rows.hf: other.hf for rows, other in zip(run[0].rows, by_expert[run[0].name].rows, strict=False)
                }
                for name in dict.fromkeys(rows.hf for rows in run[0].rows):
                    tensor = None if own is None else next(own)[1].contiguous()
                    if rank == 0 and tensor is None:
                        dtype = self._dtype(run[0], self.dtype)
                        tensor = torch.empty(self.table.shapes[name], dtype=dtype, device=self.device)
                        dist.recv(tensor, sender)
                    elif rank == sender != 0 and tensor is not None:
                        dist.send(tensor, 0)
                    if rank == 0 and tensor is not None and (run[0].expert is None or in_files[name] == name):
                        yield in_files[name], tensor
                    elif rank == 0 and tensor is not None:
                        for entry, matrix in zip(run, tensor, strict=True):
                            yield from ((at, values) for at, _, values in parts(by_expert[entry.name], matrix))
            assert own is None or next(own, None) is None

    def _runs(self, stage: int) -> Iterator[list[Entry]]:
        """A stage's tensors in order, one per list, or all experts' tensors of one matrix in a layer."""
        runs: dict[Any, list[Entry]] = defaultdict(list)
        for entry in self.table.entries:
            if self.stage_of(entry) == stage:
                runs[entry.rows[0].hf if entry.expert is not None else entry.name].append(entry)
        yield from runs.values()

    def stage_of(self, entry: Entry) -> int:
        """The pipeline stage that holds and publishes a tensor."""
        if entry.layer is not None:
            return self._layers[entry.layer]
        return 0 if entry.place == "embedding" else len(self._stages) - 1

    def _gathered(self, entry: Entry, own: Tensor, dtypes: Mapping[str, torch.dtype]) -> Tensor:
        """The whole Megatron tensor."""
        kinds = {dtypes.get(rows.hf, own.dtype) for rows in entry.rows}
        # Query, key and value have one type in the exchange; where dtypes differ, they are converted again after it.
        own = own.detach().to(max(kinds, key=lambda dtype: dtype.itemsize), copy=True).contiguous()
        rank, ranks = self.rank_of(entry)
        if entry.split is None or ranks == 1:
            return own
        expert = entry.expert is not None
        group = (
            parallel_state.get_expert_tensor_parallel_group()
            if expert
            else parallel_state.get_tensor_model_parallel_group()
        )
        shards = _all_gathered(own, group)
        assert dist.get_rank(group) == rank
        pieces = zip(*(one.chunk(entry.parts, entry.split) for one in shards), strict=True)
        return torch.cat([piece for part in pieces for piece in part], entry.split)

    @staticmethod
    def _hf(entry: Entry, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        for name, _, values in parts(entry, whole):
            yield name, values

    def _stacked(self, run: Sequence[Entry], own: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """One matrix of all experts of a layer, of which this rank holds some."""
        name = run[0].rows[0].hf
        mine = self._of_experts(run, own)
        if self._megatron.expert_parallel > 1:
            mine = torch.cat(_all_gathered(mine, parallel_state.get_expert_model_parallel_group()))
        yield name, mine.view(self.table.shapes[name])

    @staticmethod
    def _of_experts(entries: Sequence[Entry], tensors: Sequence[Tensor]) -> Tensor:
        """A slice of an HF tensor of stacked experts."""
        both = zip(entries, tensors, strict=True)
        return torch.cat([values for entry, whole in both for _, _, values in parts(entry, whole)])

    # ---- parts

    def layout(self, dtype: torch.dtype) -> list[TensorShards]:
        """See TrainEngine.weight_layout."""
        return [
            TensorShards(
                name,
                str(self._dtype(run[0], dtype)).removeprefix("torch."),
                self.table.shapes[name],
                self._parts_of(run, name),
                name in self._frozen and not run[0].name.endswith(EXPERT_BIAS),  # which may change
            )
            for stage in range(len(self._stages))
            for run in self._runs(stage)
            for name in dict.fromkeys(rows.hf for entry in run for rows in entry.rows)
        ]

    @staticmethod
    def _dtype(entry: Entry, dtype: torch.dtype) -> torch.dtype:
        """A tensor's dtype in a model whose parameters have this dtype."""
        return torch.float32 if entry.name.endswith(EXPERT_BIAS) else dtype

    def _parts_of(self, run: Sequence[Entry], name: str) -> tuple[tuple[TensorSlice, tuple[int, ...]], ...]:
        found: dict[TensorSlice, list[int]] = {}
        for rank in range(self._num_ranks):
            place = Coordinates.of(rank, self._num_ranks, self._megatron)
            if place.stage == self.stage_of(run[0]):
                found.setdefault(self._box(run, name, place), []).append(rank)
        return tuple((tensor_slice, tuple(ranks)) for tensor_slice, ranks in sorted(found.items()))

    def _box(self, run: Sequence[Entry], name: str, place: Coordinates) -> TensorSlice:
        """A rank's slice of an HF tensor, or the slice that the rank gathers because its part is not one slice."""
        if run[0].expert is not None:
            each = len(run) // self._megatron.expert_parallel
            shape = self.table.shapes[name]
            return ((place.expert * each, (place.expert + 1) * each), *((0, size) for size in shape[1:]))
        if self._is_gathered(run[0]):
            return tuple((0, size) for size in self.table.shapes[name])
        return next(part.tensor_slice for part in shard_slices(run[0], *self.rank_of(run[0], place)) if part.hf == name)

    def _is_gathered(self, entry: Entry) -> bool:
        """Whether some rank holds no part or several parts of one of the HF tensors, so ranks must gather it."""
        _, ranks = self.rank_of(entry)
        names = sorted({rows.hf for rows in entry.rows})
        return entry.expert is None and any(
            sorted(part.hf for part in shard_slices(entry, rank, ranks)) != names for rank in range(ranks)
        )

    def local_shards(self) -> Iterator[Tensor]:
        """See TrainEngine.local_shards. Collective over tensor parallel ranks."""
        for run in self._runs(self._place.stage):
            own = [(entry, self.parameters[entry.name]) for entry in run if entry.name in self.parameters]
            if run[0].expert is not None:
                yield self._of_experts(
                    [entry for entry, _ in own], [self._gathered(entry, tensor, {}) for entry, tensor in own]
                )
                continue
            [(entry, tensor)] = own
            if self._is_gathered(entry):
                yield from (values for _, values in self._hf(entry, self._gathered(entry, tensor, {})))
            else:
                yield from (values for _, _, values in parts(entry, tensor.detach(), *self.rank_of(entry)))


def _all_gathered(own: Tensor, group: Any) -> list[Tensor]:
    found = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(found, own, group)
    return found
