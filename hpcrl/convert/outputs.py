"""The files of a conversion: an HF model, or Megatron's torch_dist."""

from __future__ import annotations

import functools
import json
import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hpcrl.checkpoint.commit import METADATA
from hpcrl.convert.sources import ModelWeights, TensorSource
from hpcrl.convert.streaming import OutFile, Slot, copy_small_files
from hpcrl.convert.weight_files import CODES, INDEX, SINGLE, header
from hpcrl.engines.train.dcp import ALIGNMENT, frame, shard_name
from hpcrl.engines.train.megatron.names import Entry

FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
CHUNK_BYTES = 128 << 20
"""Size of the chunks of larger tensors. To make a chunk's header, a tensor of this size is created in memory."""
KEPT_DTYPES = ("e_score_correction_bias", "expert_bias")
"""Last parts of the names of tensors that stay fp32, whatever the model's dtype is."""


def output_dtypes(source: TensorSource, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Each tensor's dtype in the output; `dtype` None keeps the source's. ValueError for an unsupported dtype."""
    found = {
        name: dtype if dtype is not None and not name.endswith(KEPT_DTYPES) else source.dtypes[name]
        for name in source.shapes
    }
    wrong = next((name for name, kind in source.dtypes.items() if kind not in CODES), None)
    if wrong is not None:
        raise ValueError(f"{wrong} is {_text(source.dtypes[wrong])}; only {', '.join(map(_text, CODES))} are converted")
    return found


def hf_files(source: TensorSource, dtypes: Mapping[str, torch.dtype], most_bytes: int) -> list[OutFile]:
    """Weight files with at most most_bytes of tensor data each, or with one larger tensor."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in source.shapes.items():
        num_bytes = math.prod(shape) * dtypes[name].itemsize
        if shards[-1] and size + num_bytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    files = []
    for number, names in enumerate(shards, 1):
        begin, starts = header({name: (source.shapes[name], dtypes[name]) for name in names})
        slots = tuple(Slot(name, starts[name], source.shapes[name], _text(dtypes[name])) for name in names)
        last = names[-1]
        end = starts[last] + math.prod(source.shapes[last]) * dtypes[last].itemsize
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files.append(OutFile(file, end, ((0, begin),), slots))
    return files


def hf_small_files(
    files: list[OutFile], dtypes: Mapping[str, torch.dtype], config: Mapping[str, Any], origin: Path
) -> Callable[[Path], None]:
    """A function that writes the index, config.json with the dtype of most tensors, tokenizer and generation config."""

    def write(folder: Path) -> None:
        copy_small_files(origin, folder)
        kinds = [_text(dtype) for dtype in dtypes.values()]
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        _write_json(folder / "config.json", {**config, key: max(sorted(set(kinds)), key=kinds.count)})
        if len(files) > 1:
            total = sum(math.prod(slot.shape) * dtypes[slot.name].itemsize for file in files for slot in file.slots)
            weight_map = {slot.name: file.name for file in files for slot in file.slots}
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})

    return write


def megatron_files(source: ModelWeights, dtypes: Mapping[str, torch.dtype], most_bytes: int) -> list[OutFile]:
    """Shards of about most_bytes each, with one chunk per layer and expert, and several chunks for a large tensor."""
    frames = functools.cache(frame)
    files: list[OutFile] = []
    known, slots, at = list[tuple[int, bytes]](), list[Slot](), 0
    for name, entry in source.entries.items():
        dtype, leading = dtypes[name], tuple(1 for _ in _leading(entry, source))
        row_bytes = math.prod(entry.shape[1:]) * dtype.itemsize
        count = max(1, CHUNK_BYTES // row_bytes)
        for first in range(0, entry.shape[0], count):
            shape = (min(count, entry.shape[0] - first), *entry.shape[1:])
            if slots and at + shape[0] * row_bytes > most_bytes:
                files.append(OutFile(shard_name(len(files)), at, tuple(known), tuple(slots)))
                known, slots, at = [], [], 0
            head, tail = frames((*leading, *shape), dtype)
            end = at + len(head) + shape[0] * row_bytes
            known += [(at, head), (end, tail)]
            slots.append(Slot(name, at + len(head), shape, _text(dtype), first))
            at = -(-(end + len(tail)) // ALIGNMENT) * ALIGNMENT
    files.append(OutFile(shard_name(len(files)), at, tuple(known), tuple(slots)))
    return files


def megatron_small_files(
    files: list[OutFile],
    source: ModelWeights,
    dtypes: Mapping[str, torch.dtype],
    config: Mapping[str, Any],
    origin: Path,
) -> Callable[[Path], None]:
    """A function that writes the shards' metadata, Megatron's common state, and the model's config.json and tokenizer,
    which the conversion back needs."""

    def write(folder: Path) -> None:
        copy_small_files(origin, folder)
        _write_json(folder / "config.json", config)
        (folder / METADATA).write_bytes(pickle.dumps(_metadata(files, source, dtypes)))
        _write_json(folder / "metadata.json", FORMAT)
        layers = {"non_homogeneous_layers": not source.homogeneous}
        torch.save({"content_metadata": layers, "checkpoint_version": 3.0, "iteration": 0}, folder / "common.pt")

    return write


def _metadata(files: list[OutFile], source: ModelWeights, dtypes: Mapping[str, torch.dtype]) -> Metadata:
    tensors: dict[str, TensorStorageMetadata] = {}
    storage = {}
    for file in files:
        for slot, (begin, _), (middle, tail) in zip(file.slots, file.known[::2], file.known[1::2], strict=True):
            entry = source.entries[slot.name]
            leading = _leading(entry, source)
            key = _key(entry, source)
            offsets = torch.Size([*(at for at, _ in leading), slot.first, *(0 for _ in entry.shape[1:])])
            sizes = torch.Size([*(1 for _ in leading), *slot.shape])
            whole = torch.Size([*(count for _, count in leading), *entry.shape])
            properties = TensorProperties(dtype=dtypes[slot.name])
            stored = tensors.setdefault(key, TensorStorageMetadata(properties, whole, []))
            stored.chunks.append(ChunkStorageMetadata(offsets, sizes))
            storage[MetadataIndex(key, offsets)] = _StorageInfo(file.name, begin, middle + len(tail) - begin)
    return Metadata(state_dict_metadata=tensors, planner_data=None, storage_data=storage)  # type: ignore[arg-type]


def _leading(entry: Entry, source: ModelWeights) -> list[tuple[int, int]]:
    """(index, count) of an entry's layer and of its expert in the stored tensor's leading dimensions."""
    found = []
    if entry.layer is not None and source.homogeneous:
        found.append((entry.layer, source.num_layers))
    if entry.expert is not None:
        found.append((entry.expert, source.num_experts))
    return found


def _key(entry: Entry, source: ModelWeights) -> str:
    if entry.layer is None:
        return entry.name
    inside = _inside(entry)
    return f"decoder.layers.{inside}" if source.homogeneous else f"decoder.layers.{entry.layer}.{inside}"


def _inside(entry: Entry) -> str:
    """An entry's name within its layer, without the expert's number."""
    name = entry.name.removeprefix(f"decoder.layers.{entry.layer}.")
    if entry.expert is None:
        return name
    return name.replace("mlp.experts.", "mlp.experts.experts.").removesuffix(str(entry.expert))


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
