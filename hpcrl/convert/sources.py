"""Sources of a conversion's tensors: HF tensors from a checkpoint, Megatron tensors from an HF model.

They are read by rows, so memory holds only a block of rows and never a full tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hpcrl.checkpoint.shards import ShardedCheckpoint
from hpcrl.convert.file_names import FileNames, InFile
from hpcrl.convert.weight_files import WeightFiles
from hpcrl.engines.train.megatron.names import VALUE_HEAD, Entry, shard, table
from hpcrl.engines.train.megatron.stored import MegatronWeights, inside_layer, megatron_prefix
from hpcrl.models.families import family_of
from hpcrl.models.mtp import mtp_names, name_in_files, trained_names
from hpcrl.spec.lora import is_adapter
from hpcrl.spec.weight_layout import TensorSlice


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
        """Whether the model is a critic or a reward model, with a value head instead of a vocabulary projection."""

    def read(self, name: str, first: int, last: int) -> Tensor:
        """Rows `first` to `last` - 1 of a tensor. Several threads may call it at the same time."""

    def check_sums(self, report_progress: Callable[[], None]) -> None:
        """Compare the stored tensors with their stored checksums. ValueError names a damaged file. `report_progress` is
        called between two blocks; its exception ends the check."""

    def close(self) -> None:
        """Close the files."""


def _stored_by_own_layers(entry: Entry, fused: str, config: Mapping[str, Any]) -> str:
    """The name under which Megatron's own layers store a tensor, which is mostly Transformer Engine's name, `fused`."""
    if (family := family_of(config["model_type"]).megatron) and family.stores_own_names:
        return entry.name
    if entry.name == fused and ".input_layernorm." in fused:  # of a layer without a linear layer after the norm
        return entry.name
    name = entry.name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")


class TrainerWeights:
    """HF tensors from a checkpoint of an engine that uses transformers' names, such as fsdp2. Tensors named in `whole`
    are not divided among experts. ValueError if FileNames does not support the family."""

    PREFIX, MTP = "model.hf.", "model.mtp."

    def __init__(self, checkpoint: ShardedCheckpoint, config: Mapping[str, Any], whole: Collection[str] = ()):
        try:
            names = FileNames(config.get("model_type"))
        except ValueError as error:
            raise ValueError(f"{checkpoint.folder}: {error}; use the exported model in the run's folder hf") from error
        self._checkpoint = checkpoint
        self.values = f"{self.PREFIX}{VALUE_HEAD}.weight" in checkpoint.tensors
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._where: dict[str, tuple[str, TensorSlice, int]] = {}  # (tensor, leading slice, first row)
        self._mtp: set[str] = set()
        for name, stored in checkpoint.tensors.items():
            if not name.startswith((self.PREFIX, self.MTP)):
                continue
            own = name.removeprefix(self.PREFIX)
            if name.startswith(self.MTP):  # a trained layer
                own = self._mtp_name(config, name.removeprefix(self.MTP))
            in_files = [InFile(own, stored.shape, (), 0)] if own in whole else names.of(own, stored.shape)
            for hf, shape, leading, first in in_files:
                self.shapes[hf], self.dtypes[hf] = shape, stored.dtype
                self._where[hf] = (name, leading, first)
                if name.startswith(self.MTP):
                    self._mtp.add(hf)
        self._check(config)

    def _mtp_name(self, config: Mapping[str, Any], name: str) -> str:
        try:
            return name_in_files(trained_names(config), name)
        except ValueError as error:
            raise ValueError(f"{self._checkpoint.folder}: {error}; give the run's model with --model") from error

    def _check(self, config: Mapping[str, Any]) -> None:
        """Compare the checkpoint with config.json, for families with a name table."""
        if family_of(config.get("model_type")).megatron is None:
            return
        heads = self.shapes[f"{VALUE_HEAD}.weight"][0] if self.values else 1
        expected = table(config, values=self.values, bias=f"{VALUE_HEAD}.bias" in self.shapes, heads=heads).shapes
        for name in [*expected, *(name for name in self.shapes if name not in self._mtp)]:
            if (has := self.shapes.get(name)) != (needs := expected.get(name)):
                text = (
                    f"{name} has shape {list(has) if has else None}, config.json requires {list(needs or ()) or None}"
                )
                raise ValueError(f"{self._checkpoint.folder} is a checkpoint of another model: {text}")
        further = [name for name in self.shapes if name in self._mtp]
        self.shapes = {name: self.shapes[name] for name in (*expected, *further)}

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
                f"{folder} is a critic or a reward model, whose head ({VALUE_HEAD}.weight) would be lost; only "
                "language models can be converted to Megatron"
            )
        for name, shape in self.table.shapes.items():
            place = self._files.tensors.get(name)
            if place is None or place.shape != shape:
                has = f"has shape {list(place.shape)}" if place else "is missing"
                raise ValueError(f"{folder}: {name} {has}, config.json requires {list(shape)}")
        self.entries: dict[str, Entry] = {}
        for entry, own in zip(self.table.entries, table(config, "local", padded_vocabulary).entries, strict=True):
            self.entries[entry.name] = entry
            if entry.expert is None and (name := _stored_by_own_layers(own, entry.name, config)) != entry.name:
                self.entries[name] = replace(entry, name=name)
        self.num_layers = 1 + max(entry.layer or 0 for entry in self.table.entries)
        self.num_experts = 1 + max(
            (entry.expert for entry in self.table.entries if entry.expert is not None), default=0
        )
        layers: list[set[str]] = [set() for _ in range(self.num_layers)]
        for entry in self.table.entries:
            if entry.layer is not None:
                layers[entry.layer].add(inside_layer(entry.name))
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


def opened(folder: Path, config: Mapping[str, Any], model: Path) -> TensorSource:
    """The HF tensors of the checkpoint in a folder. Experts of trained MTP layers are stacked if they are in the files
    of the folder `model`. ValueError if the checkpoint is damaged, has only adapters, or does not match `config`."""
    checkpoint = ShardedCheckpoint(folder)
    if any(is_adapter(name) for name in checkpoint.tensors):
        raise ValueError(
            f"{folder} has only adapters (trainer.lora); use the exported model in the run's folder hf, into which "
            "they are merged"
        )
    if megatron_prefix(checkpoint) is not None:
        return MegatronWeights(checkpoint, config)
    if any(name.startswith(TrainerWeights.PREFIX) for name in checkpoint.tensors):
        trains_mtp = any(name.startswith(TrainerWeights.MTP) for name in checkpoint.tensors)
        return TrainerWeights(checkpoint, config, mtp_in_files(model, config) if trains_mtp else ())
    some = ", ".join(list(checkpoint.tensors)[:3]) or "none"
    raise ValueError(f"{folder} has no weights of Megatron or of hpcrl's trainers (tensors: {some})")


def mtp_in_files(model: Path, config: Mapping[str, Any]) -> list[str]:
    """Tensors of MTP layers in a model's files, if there are any."""
    if not any(model.glob("*.safetensors")):
        return []
    files = WeightFiles(model)
    files.close()
    return mtp_names(config, files.tensors)
