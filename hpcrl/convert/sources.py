"""Sources of a conversion's tensors: HF tensors from a checkpoint, Megatron tensors from an HF model.

They are read by rows, so memory holds only a block of rows and never a full tensor.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hpcrl.convert.file_names import FileNames
from hpcrl.convert.shards import ShardedCheckpoint
from hpcrl.convert.weight_files import WeightFiles
from hpcrl.engines.train.megatron.names import EMBEDDING, HEAD, VALUE_HEAD, Entry, NameTable, parts, shard, table
from hpcrl.models.families import family_of
from hpcrl.spec.lora import is_adapter
from hpcrl.spec.weight_layout import TensorSlice

MAX_SHOWN = 3
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.\d+\.(.*)")
_NO_WEIGHT = re.compile(r"optimizer\.|chained_\d|rng_state|.*_extra_state|.*rerun_state|mtp\.")


class TensorSource(Protocol):
    """Tensors that can be read by rows."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape, in the order of the output."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Name -> dtype."""

    @property
    def values(self) -> bool:
        """Whether the model is a critic: it has a value head instead of a vocabulary projection."""

    def read(self, name: str, first: int, last: int) -> Tensor:
        """Rows `first` to `last` - 1 of a tensor. Several threads may call it at the same time."""

    def check_sums(self, report_progress: Callable[[], None]) -> None:
        """Compare the stored tensors with their stored checksums. ValueError names a damaged file. `report_progress` is
        called between two blocks; its exception ends the check."""

    def close(self) -> None:
        """Close the files."""


@dataclass(frozen=True)
class _Where:
    """Location of a table entry in a checkpoint: the tensor, and the indices of layer and expert in its leading
    dimensions. `names` has two tensors for gate and up if they are stored separately."""

    names: tuple[str, ...]
    leading: TensorSlice


class MegatronWeights:
    """HF tensors from Megatron's torch_dist. ValueError if the checkpoint does not match config.json."""

    def __init__(self, checkpoint: ShardedCheckpoint, config: Mapping[str, Any]):
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
        self.values = prefix + HEAD.replace("weight", "bias") in checkpoint.tensors
        local = table(config, "local", padded_vocabulary=rows, values=self.values)
        fused = table(config, "fused", padded_vocabulary=rows, values=self.values)
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

    def read(self, name: str, first: int, last: int) -> Tensor:
        """Rows of an HF tensor."""
        if of_experts := self._stacked[name]:
            whole = ((entry, self._read(entry, 0, entry.shape[0])) for entry in of_experts[first:last])
            return torch.cat([values for entry, tensor in whole for _, _, values in parts(entry, tensor)])
        result: Tensor | None = None
        for entry, start, at, count in self._rows[name]:
            low, high = max(first, start), min(last, start + count)
            if low < high:
                part = self._read(entry, at + low - start, at + high - start)
                if (low, high) == (first, last):
                    return part
                if result is None:
                    result = part.new_empty((last - first, *part.shape[1:]))
                result[low - first : high - first] = part
        assert result is not None, "a tensor of the table has all its rows"
        return result

    def check_sums(self, report_progress: Callable[[], None]) -> None:
        """See TensorSource."""
        self._checkpoint.check_sums({name for where in self._where.values() for name in where.names}, report_progress)

    def close(self) -> None:
        """Close the files."""
        self._checkpoint.close()

    def _dtype(self, entry: Entry) -> torch.dtype:
        return self._checkpoint.tensors[self._where[entry.name].names[0]].dtype

    def _read(self, entry: Entry, first: int, last: int) -> Tensor:
        where, parts = self._where[entry.name], []
        rows = entry.shape[0] // len(where.names)
        for number, name in enumerate(where.names):
            low, high = max(first, number * rows), min(last, (number + 1) * rows)
            if low < high:
                inside = (low - number * rows, high - number * rows)
                tensor_slice = (*where.leading, inside, *((0, size) for size in entry.shape[1:]))
                parts.append(self._checkpoint.read(name, tensor_slice).view(high - low, *entry.shape[1:]))
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
    inside = [_inside(entry.name), _inside(fused.name)]
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


def _inside(name: str) -> str:
    match = _LAYER.match(name)
    assert match is not None, name
    return match[2]


def _stored_by_own_layers(entry: Entry, config: Mapping[str, Any]) -> str:
    """The name under which Megatron's own layers store a tensor, which is mostly Transformer Engine's name."""
    if (family := family_of(config["model_type"]).megatron) and family.stores_own_names:
        return entry.name
    name = entry.name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")


class TrainerWeights:
    """HF tensors from a checkpoint of an engine that uses transformers' names, such as fsdp2. ValueError if FileNames
    does not support the family, or if the checkpoint has only adapters."""

    PREFIX = "model.hf."

    def __init__(self, checkpoint: ShardedCheckpoint, config: Mapping[str, Any]):
        try:
            names = FileNames(config.get("model_type"))
        except ValueError as error:
            raise ValueError(f"{checkpoint.folder}: {error}; use the exported model in the run's folder hf") from error
        if any(is_adapter(name) for name in checkpoint.tensors):
            raise ValueError(
                f"{checkpoint.folder} has only adapters (trainer.lora); use the exported model in the run's folder "
                "hf, into which they are merged"
            )
        self._checkpoint = checkpoint
        self.values = f"{self.PREFIX}{VALUE_HEAD}.weight" in checkpoint.tensors
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._where: dict[str, tuple[str, TensorSlice, int]] = {}  # (tensor, leading slice, first row)
        for name, stored in checkpoint.tensors.items():
            if name.startswith(self.PREFIX):
                for hf, shape, leading, first in names.of(name.removeprefix(self.PREFIX), stored.shape):
                    self.shapes[hf], self.dtypes[hf] = shape, stored.dtype
                    self._where[hf] = (name, leading, first)
        self._check(config)

    def _check(self, config: Mapping[str, Any]) -> None:
        """Compare the checkpoint with config.json, for families with a name table."""
        if family_of(config.get("model_type")).megatron is None:
            return
        expected = table(config, values=self.values).shapes
        for name in [*expected, *self.shapes]:
            if (has := self.shapes.get(name)) != (needs := expected.get(name)):
                text = (
                    f"{name} has shape {list(has) if has else None}, config.json requires {list(needs or ()) or None}"
                )
                raise ValueError(f"{self._checkpoint.folder} is a checkpoint of another model: {text}")
        self.shapes = {name: self.shapes[name] for name in expected}

    def read(self, name: str, first: int, last: int) -> Tensor:
        """Rows of an HF tensor."""
        stored, leading, start = self._where[name]
        shape = self.shapes[name]
        tensor_slice = (*leading, (start + first, start + last), *((0, size) for size in shape[1:]))
        return self._checkpoint.read(stored, tensor_slice).view(last - first, *shape[1:])

    def check_sums(self, report_progress: Callable[[], None]) -> None:
        """See TensorSource."""
        self._checkpoint.check_sums({self._where[name][0] for name in self.shapes}, report_progress)

    def close(self) -> None:
        """Close the files."""
        self._checkpoint.close()


class ModelWeights:
    """Megatron tensors from an HF model. Norms get names that Megatron's own and Transformer Engine's layers load.
    `homogeneous`: all layers have the same tensors. ValueError if the model does not match its config.json."""

    values = False

    def __init__(self, folder: Path, config: Mapping[str, Any], padded_vocabulary: int):
        self.table = table(config, "fused", padded_vocabulary)
        self._files = WeightFiles(folder)
        self._last = threading.local()
        if f"{VALUE_HEAD}.weight" in self._files.tensors:
            raise ValueError(
                f"{folder} is a critic, whose value head ({VALUE_HEAD}.weight) would be lost; only language models "
                "can be converted to Megatron"
            )
        for name, shape in self.table.shapes.items():
            place = self._files.tensors.get(name)
            if place is None or place.shape != shape:
                has = f"has shape {list(place.shape)}" if place else "is missing"
                raise ValueError(f"{folder}: {name} {has}, config.json requires {list(shape)}")
        self.entries: dict[str, Entry] = {}
        for entry, own in zip(self.table.entries, table(config, "local", padded_vocabulary).entries, strict=True):
            self.entries[entry.name] = entry
            if entry.expert is None and (name := _stored_by_own_layers(own, config)) != entry.name:
                self.entries[name] = replace(entry, name=name)
        self.num_layers = 1 + max(entry.layer or 0 for entry in self.table.entries)
        self.num_experts = 1 + max(
            (entry.expert for entry in self.table.entries if entry.expert is not None), default=0
        )
        layers: list[set[str]] = [set() for _ in range(self.num_layers)]
        for entry in self.table.entries:
            if entry.layer is not None:
                layers[entry.layer].add(_inside(entry.name))
        self.homogeneous = all(names == layers[0] for names in layers)
        self.shapes = {name: entry.shape for name, entry in self.entries.items()}
        self.dtypes = {name: self._files.tensors[entry.rows[0].hf].dtype for name, entry in self.entries.items()}

    def read(self, name: str, first: int, last: int) -> Tensor:
        """Rows of a Megatron tensor; padding rows are zero."""
        entry = self.entries[name]
        if entry.rows[0].expert is not None:
            return self._expert(entry)[first:last]
        result: Tensor | None = None
        for rows in entry.rows:
            low, high = max(first, rows.at), min(last, rows.at + rows.count)
            if low < high:
                start = rows.first + low - rows.at
                part = self._files.read(rows.hf, start, start + high - low)
                if (low, high) == (first, last):
                    return part
                if result is None:
                    result = torch.zeros((last - first, *entry.shape[1:]), dtype=part.dtype)
                result[low - first : high - first] = part
        return torch.zeros((last - first, *entry.shape[1:]), dtype=self.dtypes[name]) if result is None else result

    def _expert(self, entry: Entry) -> Tensor:
        """A tensor of one expert, which has a slice of the HF tensor of all experts. Each thread keeps the last one,
        whose rows it needs block by block."""
        last: tuple[str, Tensor] | None = getattr(self._last, "expert", None)
        if last is None or last[0] != entry.name:
            (name,) = {rows.hf for rows in entry.rows}
            last = entry.name, shard(entry, {name: _Slices(self._files, name)})
            self._last.expert = last
        return last[1]

    def check_sums(self, report_progress: Callable[[], None]) -> None:
        """Does nothing: safetensors files have no checksums."""

    def close(self) -> None:
        """Close the files."""
        self._files.close()


class _Slices:
    """An HF tensor in files, of which indexing reads slices."""

    def __init__(self, files: WeightFiles, name: str):
        self._files, self._name = files, name

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        rows, *rest = index
        return self._files.read(self._name, rows.start, rows.stop)[(slice(None), *rest)]


def opened(folder: Path, config: Mapping[str, Any]) -> TensorSource:
    """The HF tensors of the checkpoint in a folder. ValueError if it is damaged or does not match `config`."""
    checkpoint = ShardedCheckpoint(folder)
    if megatron_prefix(checkpoint) is not None:
        return MegatronWeights(checkpoint, config)
    if any(name.startswith(TrainerWeights.PREFIX) for name in checkpoint.tensors):
        return TrainerWeights(checkpoint, config)
    some = ", ".join(list(checkpoint.tensors)[:3]) or "none"
    raise ValueError(f"{folder} has no weights of Megatron or of hpcrl's trainers (tensors: {some})")
