"""The tensors of a torch_dist checkpoint, of Megatron-LM or of hpcrl's trainer, under transformers' names; without
Megatron-Core."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcrl.checkpoint.shards import ShardedCheckpoint
from hpcrl.engines.train.megatron.names import EMBEDDING, HEAD, Entry, NameTable, parts, table
from hpcrl.spec.lora import is_adapter
from hpcrl.spec.weight_layout import TensorSlice

MAX_SHOWN = 3
STATE = "optimizer.state."
MASTER_KEY = "fp32_param"
"""The optimizer's fp32 copy of a weight, which a run in fp32 does not have."""
MASTER = f"{STATE}{MASTER_KEY}."
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.\d+\.(.*)")
_NO_WEIGHT = re.compile(r"optimizer\.|chained_\d|rng_state|.*_extra_state|.*rerun_state|mtp\.")


@dataclass(frozen=True)
class _Where:
    """Location of a table entry in a checkpoint: the tensor, and the indices of layer and expert in its leading
    dimensions. `names` has two tensors for gate and up if they are stored separately."""

    names: tuple[str, ...]
    leading: TensorSlice


class MegatronWeights:
    """HF tensors from Megatron's torch_dist. ValueError if the checkpoint does not match config.json."""

    def __init__(self, checkpoint: ShardedCheckpoint, config: Mapping[str, Any], stacked: bool = False):
        """`stacked` means HF names as in transformers' memory, where one tensor has all experts of a layer."""
        self._checkpoint = checkpoint
        prefix = megatron_prefix(checkpoint)
        assert prefix is not None, "the caller has looked"
        self._prefix = prefix
        rows = checkpoint.tensors[prefix + EMBEDDING].shape[0]
        vocabulary = config.get("vocab_size")
        if isinstance(vocabulary, int) and rows < vocabulary:
            raise ValueError(
                f"{checkpoint.folder}: {prefix + EMBEDDING} has {rows} rows, but config.json vocab_size={vocabulary}: "
                "the checkpoint is of another model"
            )
        head = checkpoint.tensors.get(prefix + HEAD)
        bias = prefix + HEAD.replace("weight", "bias") in checkpoint.tensors
        self.values = bias or (head is not None and head.shape[0] < rows)
        heads = head.shape[0] if head is not None and self.values else 1
        local = table(config, "local", rows, stacked, self.values, bias, heads)
        fused = table(config, "fused", rows, stacked, self.values, bias, heads)
        self._where = self._find(local, fused)
        self.shapes = local.shapes
        self._rows: dict[str, list[tuple[Entry, int, int, int]]] = {name: [] for name in self.shapes}
        self._stacked: dict[str, list[Entry]] = {}  # tensors of all experts, by expert
        for entry in local.entries:
            for piece in entry.rows:
                self._rows[piece.hf].append((entry, piece.first, piece.at, piece.count))
                if piece.expert == len(of_experts := self._stacked.setdefault(piece.hf, [])):
                    of_experts.append(entry)
        self.dtypes = {name: self._dtype(pieces[0][0]) for name, pieces in self._rows.items()}

    def read(self, name: str, first: int, last: int, state: str = "") -> Tensor:
        """Rows of an HF tensor or, with `state`, of the optimizer's tensor of this name for it. ValueError if the
        optimizer has none."""
        if of_experts := self._stacked[name]:
            whole = ((entry, self._read(entry, 0, entry.shape[0], state)) for entry in of_experts[first:last])
            return torch.cat([values for entry, tensor in whole for _, _, values in parts(entry, tensor)])
        result: Tensor | None = None
        for entry, start, at, count in self._rows[name]:
            low, high = max(first, start), min(last, start + count)
            if low < high:
                part = self._read(entry, at + low - start, at + high - start, state)
                if (low, high) == (first, last):
                    return part
                if result is None:
                    result = part.new_empty((last - first, *part.shape[1:]))
                result[low - first : high - first] = part
        assert result is not None, "a tensor of the table has all its rows"
        return result

    def has(self, name: str, state: str) -> bool:
        """Whether the optimizer has a tensor of this name for an HF tensor."""
        stored = self._where[self._rows[name][0][0].name].names[0]
        return f"{STATE}{state}.{stored}" in self._checkpoint.tensors

    def check_sums(self, report_progress: Callable[[], None]) -> None:
        """See TensorSource."""
        self._checkpoint.check_sums({name for where in self._where.values() for name in where.names}, report_progress)

    def close(self) -> None:
        """Close the files."""
        self._checkpoint.close()

    def _dtype(self, entry: Entry) -> torch.dtype:
        return self._checkpoint.tensors[self._where[entry.name].names[0]].dtype

    def _read(self, entry: Entry, first: int, last: int, state: str) -> Tensor:
        where, parts = self._where[entry.name], []
        before = f"{STATE}{state}." if state else ""
        rows = entry.shape[0] // len(where.names)
        for number, name in enumerate(where.names):
            low, high = max(first, number * rows), min(last, (number + 1) * rows)
            if low < high:
                inside = (low - number * rows, high - number * rows)
                tensor_slice = (*where.leading, inside, *((0, size) for size in entry.shape[1:]))
                parts.append(self._checkpoint.read(before + name, tensor_slice).view(high - low, *entry.shape[1:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _find(self, local: NameTable, fused: NameTable) -> dict[str, _Where]:
        folder, tensors = self._checkpoint.folder, self._checkpoint.tensors
        found: dict[str, _Where] = {}
        missing: list[str] = []
        wrong: list[str] = []
        num_layers = 1 + max(entry.layer or 0 for entry in local.entries)
        num_experts = 1 + max((entry.expert for entry in local.entries if entry.expert is not None), default=0)
        used: set[str] = set()
        for entry, other in zip(local.entries, fused.entries, strict=True):
            for where, shape in _candidates(entry, other, num_layers, num_experts):
                names = tuple(self._prefix + name for name in where.names)
                if not all(name in tensors for name in names):
                    continue
                used.update(names)
                if entry.name not in found:
                    found[entry.name] = _Where(names, where.leading)
                    if tensors[names[0]].shape != shape:
                        has = list(tensors[names[0]].shape)
                        wrong.append(f"{names[0]} has shape {has}, config.json requires {list(shape)}")
            if entry.name not in found:
                missing.append(entry.name)
        extra = sorted(name for name in tensors if name not in used and self._is_weight(name))
        for problems, what in ((wrong, ""), (missing, "no "), (extra, "config.json has no place for ")):
            if problems := list(dict.fromkeys(problems)):
                more = f" (and {len(problems) - MAX_SHOWN} more)" if len(problems) > MAX_SHOWN else ""
                shown = "; ".join(problems[:MAX_SHOWN])
                raise ValueError(f"{folder} is a checkpoint of another model: {what}{shown}{more}")
        return found

    def _is_weight(self, name: str) -> bool:
        at = name.removeprefix(self._prefix)
        weights = ("decoder.", EMBEDDING, HEAD)
        return name.startswith(self._prefix) and at.startswith(weights) and not _NO_WEIGHT.match(at)


def megatron_prefix(checkpoint: ShardedCheckpoint) -> str | None:
    """Prefix of Megatron's names in a checkpoint; None if it has no such names."""
    names = [name for name in checkpoint.tensors if name.endswith(EMBEDDING) and not _NO_WEIGHT.match(name)]
    return min(names, key=len).removesuffix(EMBEDDING) if names else None


def _candidates(
    entry: Entry, fused: Entry, num_layers: int, num_experts: int
) -> Iterator[tuple[_Where, tuple[int, ...]]]:
    """Possible locations of an entry in torch_dist, with the stored shape: under the names of Megatron's own or
    Transformer Engine's layers; with layers, experts, and gate and up each stacked in one tensor or separate."""
    if entry.layer is None:
        yield _Where((entry.name,), ()), entry.shape
        return
    inside = [inside_layer(entry.name), inside_layer(fused.name)]
    if inside[0].startswith("pre_mlp_layernorm"):
        inside.append("mlp.linear_fc1.layer_norm_weight")  # the name in Megatron's own layers, with or without experts
    forms: list[tuple[str, TensorSlice, tuple[int, ...]]] = [(name, (), ()) for name in dict.fromkeys(inside)]
    if entry.expert is not None and (match := _EXPERT.match(inside[0])):
        at = ((entry.expert, entry.expert + 1),)
        forms.append((f"mlp.experts.experts.{match[1]}", at, (num_experts,)))
        forms.append((f"mlp.experts.experts.{entry.expert}.{match[1]}", (), ()))
    layer = ((entry.layer, entry.layer + 1),)
    for name, leading, sizes in forms:
        shape = (*sizes, *entry.shape)
        yield _Where((f"decoder.layers.{entry.layer}.{name}",), leading), shape
        yield _Where((f"decoder.layers.{name}",), (*layer, *leading)), (num_layers, *shape)
        if entry.parts == 2:
            both = tuple(f"decoder.layers.{entry.layer}.{name}_{which}" for which in "wv")
            yield _Where(both, leading), (*sizes, entry.shape[0] // 2, *entry.shape[1:])


def inside_layer(name: str) -> str:
    """The name of a layer's tensor in its layer."""
    match = _LAYER.match(name)
    assert match is not None, name
    return match[2]


def stored_state(folder: Path, config: Mapping[str, Any]) -> AdaptersState | MegatronState:
    """The state in a folder that a Megatron trainer has written: of adapters, or of the whole model in config.json.
    ValueError if it is damaged, or does not match config.json."""
    checkpoint = ShardedCheckpoint(folder)
    has_adapters = any(is_adapter(name) for name in checkpoint.tensors)
    return AdaptersState(checkpoint) if has_adapters else MegatronState(checkpoint, config)


class AdaptersState:
    """See StoredState (hpcrl.engines.train.stored_state). Adapters are stored under transformers' names. Weights are
    the optimizer's fp32 copies, where it has them."""

    def __init__(self, checkpoint: ShardedCheckpoint):
        self._checkpoint = checkpoint
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tensor.shape for name, tensor in checkpoint.tensors.items() if not name.startswith(STATE)
        }

    def has(self, name: str, key: str) -> bool:
        """See StoredState."""
        return (f"{STATE}{key}.{name}" if key else name) in self._checkpoint.tensors

    def read(self, name: str, key: str, tensor_slice: TensorSlice) -> Tensor:
        """See StoredState."""
        state = key or (MASTER_KEY if self.has(name, MASTER_KEY) else "")
        return self._checkpoint.read(f"{STATE}{state}.{name}" if state else name, tensor_slice)

    def close(self) -> None:
        """See StoredState."""
        self._checkpoint.close()


class MegatronState:
    """See StoredState (hpcrl.engines.train.stored_state). Weights are the optimizer's fp32 copies, where it has them.
    ValueError if the checkpoint does not match config.json."""

    def __init__(self, checkpoint: ShardedCheckpoint, config: Mapping[str, Any]):
        self._checkpoint = checkpoint
        if megatron_prefix(checkpoint) != "":
            raise ValueError(f"checkpoint {checkpoint.folder}: no {EMBEDDING}; this is not a trainer's checkpoint")
        self._weights = MegatronWeights(checkpoint, config, stacked=True)
        self.shapes: Mapping[str, tuple[int, ...]] = self._weights.shapes

    def has(self, name: str, key: str) -> bool:
        """See StoredState."""
        return name in self.shapes and (not key or self._weights.has(name, key))

    def read(self, name: str, key: str, tensor_slice: TensorSlice) -> Tensor:
        """See StoredState. All columns of the slice's rows are read, and experts one by one."""
        (first, last), *columns = tensor_slice
        state = key or (MASTER_KEY if self._weights.has(name, MASTER_KEY) else "")
        rows = self._weights.read(name, first, last, state)
        return rows[(slice(None), *(slice(*span) for span in columns))]

    def close(self) -> None:
        """See StoredState."""
        self._checkpoint.close()
