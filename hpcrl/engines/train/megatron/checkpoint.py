"""A trainer's part of a checkpoint, in Megatron's format torch_dist: tensors by torch.distributed.checkpoint, under
names that do not depend on the split, and random state by rank.

Moments have the names of Megatron's "fully reshardable" format, but no rank gathers them: a rank writes the pieces that
it updates.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import pickle
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories, is_main_replica
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, Metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hpcrl.checkpoint.writer import Files, Pieces, SharedFile
from hpcrl.engines.train.dcp import ALIGNMENT, FACTS, Base, facts, frame, random_state, require_no_others, shard_name
from hpcrl.engines.train.megatron.names import Entry, shard
from hpcrl.engines.train.megatron.optimizer import Optimizer
from hpcrl.engines.train.megatron.stored import MASTER, MASTER_KEY, STATE
from hpcrl.engines.train.megatron.weights import HFWeights, state_of
from hpcrl.engines.train.offloading import register, wait
from hpcrl.engines.train.router_keys import BIAS
from hpcrl.engines.train.stored_state import TORCH_DIST, StoredState, opened, require_tensors

BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""The content of metadata.json, by which Megatron-LM recognises the format."""
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors whose number of rows depends on the split."""


@dataclass(frozen=True)
class StatePiece:
    """A slice of a tensor of the checkpoint."""

    key: str  # the tensor's name
    shape: tuple[int, ...]  # the tensor's shape
    offset: tuple[int, ...]  # the slice's offset in the tensor
    values: Tensor  # a view of the state, in the slice's shape
    written: bool  # whether this rank writes the slice

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(self.values.shape)


def pieces(chunks: Sequence[Any], optimizer: Optimizer) -> Iterator[StatePiece]:
    """All pieces of state that this rank needs. Of equal pieces on several ranks, one is marked as written."""
    for chunk in chunks:
        tensors, parameters = dict(state_of(chunk.module)), dict(chunk.module.named_parameters())
        for name, value in _sharded(chunk).items():
            if name in tensors:
                parameter = tensors[name]
                first, state = optimizer.state_of(parameter) if name in parameters else (0, {})
                for shard in value if isinstance(value, list) else [value]:
                    yield from _of_shard(shard, parameter, first, state, optimizer.is_distributed)


def weight_names(chunks: Sequence[Any]) -> set[str]:
    """Names that all stages' tensors have in a checkpoint. Collective over the engine's ranks."""
    values = [value for chunk in chunks for value in _sharded(chunk).values()]
    shards = [shard for value in values for shard in (value if isinstance(value, list) else [value])]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, {shard.key for shard in shards if isinstance(shard, ShardedTensor)})
    return set().union(*of_ranks)


def _objects(chunks: Sequence[Any]) -> dict[str, bytes]:
    """Additional objects that this rank writes: empty `_extra_state`, without which Megatron-LM reads no checkpoint."""
    found = {}
    for value in (value for chunk in chunks for value in _sharded(chunk).values()):
        if isinstance(value, ShardedObject) and is_main_replica(value.replica_id):
            buffer = io.BytesIO()
            torch.save([value.data], buffer)
            found[value.unique_key] = buffer.getvalue()
    return found


def _sharded(chunk: Any) -> dict[str, Any]:
    """Megatron's description of a chunk's state: parts of tensors by parameter name."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    named: dict[str, Any] = chunk.module.sharded_state_dict(metadata={"dp_cp_group": group})
    apply_factories(named)
    return named


def _of_shard(
    shard: ShardedTensor, parameter: Tensor, first: int, state: dict[str, Tensor], is_distributed: bool
) -> Iterator[StatePiece]:
    """A part of a parameter, and the state of its numbers that this rank updates. With is_distributed, no other
    data-parallel rank updates these numbers."""
    assert shard.data is not None
    leading = (1,) * shard.prepend_axis_num
    values = shard.data.detach()
    yield StatePiece(
        shard.key,
        tuple(shard.global_shape),
        tuple(shard.global_offset),
        values.view(*leading, *values.shape),
        is_main_replica(shard.replica_id),
    )
    assert isinstance(shard.replica_id, tuple)  # the last number is the data parallel rank
    written = not any(shard.replica_id[:-1]) if is_distributed else is_main_replica(shard.replica_id)
    at = (values.data_ptr() - parameter.data_ptr()) // values.itemsize
    for key, flat in state.items():
        low, high = max(at, first), min(at + values.numel(), first + flat.numel())
        for offset, size, span in _boxes(tuple(values.shape), low - at, high - at):
            tensor_slice = flat[span.start + at - first : span.stop + at - first].view(*leading, *size)
            start = [*shard.global_offset]
            for axis, more in enumerate(offset, len(leading)):
                start[axis] += more
            yield StatePiece(
                f"{STATE}{key}.{shard.key}", tuple(shard.global_shape), tuple(start), tensor_slice, written
            )


def _boxes(shape: tuple[int, ...], low: int, high: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], range]]:
    """(offset, size, numbers) of the slices for the numbers `low` to `high` of a flattened tensor: the rest of a row,
    full rows, the beginning of a row. Parts of a row that is no vector are divided in the same way."""
    if low >= high:
        return
    if len(shape) == 1:
        yield (low,), (high - low,), range(low, high)
        return
    inside, width = shape[1:], math.prod(shape[1:])
    cuts = sorted({low, min(high, -(-low // width) * width), max(low, high // width * width), high})
    for start, end in pairwise(cuts):
        row, column = divmod(start, width)
        if (end - start) % width == 0:
            yield (row, *(0 for _ in inside)), ((end - start) // width, *inside), range(start, end)
            continue
        for offset, size, span in _boxes(inside, column, column + end - start):
            yield (row, *offset), (1, *size), range(span.start + row * width, span.stop + row * width)


class TorchDistSnapshots:
    """A rank's pieces and random state as files to write: copies in host memory, or references.

    The layout of the rank's file is made once; later snapshots only copy bytes, and no rank waits for another.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Optimizer, base: Base | None = None):
        """`base` identifies the frozen weights, if only adapters are saved."""
        self._chunks, self._optimizer, self._base = chunks, optimizer, base
        self._frames: list[tuple[bytes, bytes]] = []
        self._metadata, self._size, self._objects = b"", 0, b""
        self._shard: SharedFile | None = None
        self._is_laid_out = False

    def take(self, optimizer_step: int, copy: bool) -> Files:
        """This rank's files. They are valid until the next call or, without a copy, until a tensor changes. The first
        call is collective. OSError if the rank lacks memory for a copy."""
        mine = [piece for piece in pieces(self._chunks, self._optimizer) if piece.written]
        if not self._is_laid_out:
            self._lay_out(mine)
        rank, state = dist.get_rank(), io.BytesIO()
        torch.save(random_state(), state)
        files: Files = {f"random_rank{rank}.pt": state.getvalue()}
        if self._size:
            files[shard_name(rank)] = self._copied(mine) if copy else Pieces(self._size, self._parts(mine))
        if rank == 0:
            common = io.BytesIO()
            torch.save({"iteration": optimizer_step, "checkpoint_version": 3.0}, common)
            files |= {
                ".metadata": self._metadata,
                "common.pt": common.getvalue(),
                TORCH_DIST: json.dumps(BACKEND).encode(),
                FACTS: facts(optimizer_step, self._base),
            }
        return files

    def _copied(self, mine: Sequence[StatePiece]) -> SharedFile:
        if self._shard is None:
            self._shard = SharedFile(self._size)
            register(torch.frombuffer(self._shard.buffer, dtype=torch.uint8))
        buffer, at = self._shard.buffer, 0
        whole = torch.frombuffer(buffer, dtype=torch.uint8)
        for piece, (head, tail) in zip(mine, self._frames, strict=True):
            values = piece.values
            start, end = at + len(head), at + len(head) + values.nbytes
            whole[start:end].view(values.dtype).view(values.shape).copy_(values, non_blocking=True)
            buffer[at:start], buffer[end : end + len(tail)] = head, tail
            at = -(-(end + len(tail)) // ALIGNMENT) * ALIGNMENT
        buffer[at : at + len(self._objects)] = self._objects
        wait()
        return self._shard

    def _parts(self, mine: Sequence[StatePiece]) -> Iterator[memoryview]:
        """The file's bytes in order. Tensors on a GPU are copied to the host one at a time."""
        for piece, (head, tail) in zip(mine, self._frames, strict=True):
            values = piece.values.cpu().contiguous()
            yield memoryview(head)
            yield values.view(-1).view(torch.uint8).numpy().data
            yield memoryview(tail + bytes(-(len(head) + values.nbytes + len(tail)) % ALIGNMENT))
        yield memoryview(self._objects)

    def _lay_out(self, mine: Sequence[StatePiece]) -> None:
        framed = cache(frame)
        self._frames = [framed(piece.values.shape, piece.values.dtype) for piece in mine]
        entries = []
        for piece, (head, tail) in zip(mine, self._frames, strict=True):
            length = len(head) + piece.values.nbytes + len(tail)
            entries.append((piece.key, piece.shape, piece.offset, piece.size, piece.values.dtype, self._size, length))
            self._size += -(-length // ALIGNMENT) * ALIGNMENT
        objects = []
        for key, content in _objects(self._chunks).items():
            objects.append((key, self._size, len(content)))
            self._objects += content
            self._size += len(content)
        gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object((entries, objects), gathered)
        if gathered is not None:
            self._metadata = pickle.dumps(_metadata(gathered))
        self._is_laid_out = True


def _metadata(gathered: Sequence[tuple[list[Any], list[Any]]]) -> Metadata:
    """The index of the pieces and objects in all ranks' files."""
    tensors: dict[str, TensorStorageMetadata] = {}
    others: dict[str, BytesStorageMetadata] = {}
    places = {}
    for rank, (entries, objects) in enumerate(gathered):
        for key, at, length in objects:
            others[key] = BytesStorageMetadata()
            places[MetadataIndex(key)] = _StorageInfo(shard_name(rank), at, length)
        for key, shape, offset, size, dtype, at, length in entries:
            found = tensors.setdefault(key, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), []))
            found.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
            places[MetadataIndex(key, torch.Size(offset))] = _StorageInfo(shard_name(rank), at, length)
    for key, found in tensors.items():
        held = sum(math.prod(chunk.sizes) for chunk in found.chunks)
        assert held == math.prod(found.size), f"{key} has {math.prod(found.size)} numbers, the ranks write {held}"
    return Metadata({**tensors, **others}, storage_data=places)


class _Planner(DefaultLoadPlanner):
    """Reads values directly into the pieces."""

    def __init__(self, wanted: Sequence[StatePiece]):
        super().__init__()
        self._values = {MetadataIndex(piece.key, torch.Size(piece.offset)): piece.values for piece in wanted}

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        values = self._values[MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)]
        for axis, (first, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            values = values.narrow(axis, first, length)
        return values

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Part of LoadPlanner. Does nothing, since the values are already in place."""


@torch.no_grad()
def read(folder: Path, chunks: Sequence[Any], optimizer: Optimizer, names: Collection[str]) -> None:
    """Restore a checkpoint's tensors, for any split. Each rank reads its own shards. `names` are weight_names(chunks).
    ValueError if the checkpoint was written for another model."""
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    stored = metadata.state_dict_metadata.items()
    weights = (name for name, one in stored if isinstance(one, TensorStorageMetadata) and not name.startswith(STATE))
    require_no_others(folder, weights, names)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    wanted = list(pieces(chunks, optimizer))
    plan = reader.prepare_local_plan(LoadPlan(_items(folder, wanted, metadata)))
    reader.read_data(plan, _Planner(wanted)).wait()


@torch.no_grad()
def read_named(folder: Path, weights: HFWeights, optimizer: Optimizer, model_path: Path) -> None:
    """Restore the tensors that another engine has written under transformers' names. Each rank reads its own shards, of
    which the ranks that share a shard's moments read the whole. Routers' biases stay as they are if they are missing,
    since earlier versions saved none with deepspeed. ValueError as in read()."""
    state = opened(folder, model_path)
    shapes = weights.table.shapes
    missing = {name for name in shapes if name.endswith(BIAS) and not state.has(name, "")}
    wanted = {(name, ""): shape for name, shape in shapes.items() if name not in missing}
    held = []
    for entry, tensor in weights.held():
        if not missing.isdisjoint(rows.hf for rows in entry.rows):
            continue
        first, flat = optimizer.state_of(tensor) if isinstance(tensor, nn.Parameter) else (0, {})
        held.append((entry, tensor, first, flat))
        keys = [key for key in flat if key != MASTER_KEY]
        wanted |= {(rows.hf, key): shapes[rows.hf] for rows in entry.rows for key in keys}
    require_tensors(folder, state, wanted)
    for entry, tensor, first, flat in held:
        full = _shard_of(entry, state, "", weights.rank_of(entry))
        tensor.copy_(full)
        for key, values in flat.items():
            part = full if key == MASTER_KEY else _shard_of(entry, state, key, weights.rank_of(entry))
            values.copy_(part.view(-1)[first : first + values.numel()])
    state.close()


def _shard_of(entry: Entry, state: StoredState, key: str, place: tuple[int, int]) -> Tensor:
    """A rank's part of a Megatron tensor, float32; padding is zero."""
    tensors = {rows.hf: _Slices(state, rows.hf, key) for rows in entry.rows}
    return shard(entry, tensors, *place, dtype=torch.float32)


class _Slices:
    """A stored tensor of which indexing reads a slice."""

    def __init__(self, state: StoredState, name: str, key: str):
        self._state, self._name, self._key = state, name, key

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self._state.read(self._name, self._key, tuple((span.start, span.stop) for span in index))


def _items(folder: Path, wanted: Sequence[StatePiece], metadata: Metadata) -> list[ReadItem]:
    """The read items for the pieces. ValueError names the first tensor that is missing or has another shape."""
    by_key: dict[str, list[StatePiece]] = {}
    for piece in wanted:
        by_key.setdefault(piece.key, []).append(piece)
    items: list[ReadItem] = []
    for key, parts in by_key.items():
        # A run in fp32 has written no master copies.
        source = key if key in metadata.state_dict_metadata else key.removeprefix(MASTER)
        stored: Any = metadata.state_dict_metadata.get(source)
        if stored is None:
            raise ValueError(f"checkpoint {folder}: it lacks {key}; it is of another model")
        padded = key.endswith(PADDED)
        if tuple(stored.size)[padded:] != parts[0].shape[padded:]:
            raise ValueError(
                f"checkpoint {folder}: {key} has shape {list(stored.size)}, this model needs {list(parts[0].shape)}"
            )
        for piece in parts if padded else ():
            piece.values.zero_()  # padding rows that the checkpoint may lack
        places = [ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.size)) for piece in parts]
        for item in create_read_items_for_chunk_list(source, stored, places):
            items.append(dataclasses.replace(item, dest_index=dataclasses.replace(item.dest_index, fqn=key)))
    return items
