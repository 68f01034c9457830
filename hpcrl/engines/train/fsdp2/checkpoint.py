"""A trainer's part of a checkpoint: sharded tensors by torch.distributed.checkpoint, random state by rank."""

from __future__ import annotations

import errno
import functools
import io
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import (
    CheckpointException,
    FileSystemReader,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageWriter,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.futures import Future

from hpcrl.checkpoint.writer import Files, Pieces, SharedFile
from hpcrl.engines.train.dcp import ALIGNMENT, FACTS, Base, facts, frame, random_state, readable, restore, shard_name
from hpcrl.engines.train.fail_together import agreed
from hpcrl.engines.train.fsdp2.weights import local
from hpcrl.engines.train.offloading import register, wait
from hpcrl.engines.train.stored_state import STATE, WEIGHTS, is_megatron, opened, require_tensors
from hpcrl.spec.lora import is_adapter

NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG))
"""Values of errno if shared memory cannot be allocated."""
Whole = Callable[[str, Tensor], Tensor]
"""(name of a parameter, its tensor or moment) -> the tensor as a shard of the full parameter."""


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None, whole: Whole) -> dict[str, Tensor]:
    """Weights and moments by name, not copied. Tied weights appear once, under their first name; of a model with
    adapters, only what is trained appears."""
    if optimizer is not None and not optimizer.state:
        get_optimizer_state_dict(model, optimizer)  # runs an empty step, which creates the moments
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].zero_()
    first: dict[int, str] = {}
    tensors = {}
    values = model.state_dict(keep_vars=True)
    if any(map(is_adapter, values)):
        values = {name: value for name, value in values.items() if value.requires_grad}
    for name, value in values.items():
        if first.setdefault(id(value), name) == name:
            tensors[f"model.{name}"] = whole(name, value.detach())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items() if optimizer is not None else ():
            tensors[f"optimizer.state.{name}.{key}"] = whole(name, value)
    return tensors


@torch.no_grad()
def _read_named(folder: Path, model_path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's shards of _tensors(), except steps, with the state that another engine has written. ValueError
    if it is of another model, or is not the optimizer's."""
    wanted = {_name_and_key(name): value for name, value in tensors.items() if not name.endswith(".step")}
    state = opened(folder, model_path)
    require_tensors(folder, state, {place: tuple(value.shape) for place, value in wanted.items()})
    for (name, key), value in wanted.items():
        sizes, offsets = tuple(value.shape), (0,) * value.dim()
        if isinstance(value, DTensor):
            sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        if math.prod(sizes):
            box = tuple((first, first + size) for first, size in zip(offsets, sizes, strict=True))
            local(value).copy_(state.read(name, key, box))
    state.close()


def _name_and_key(name: str) -> tuple[str, str]:
    """A tensor's name and key in StoredState."""
    if name.startswith(WEIGHTS):
        return name.removeprefix(WEIGHTS), ""
    parameter, _, key = name.removeprefix(STATE).rpartition(".")
    return parameter, key


class Snapshots:
    """A rank's sharded tensors and random state as files to write: copies in host memory, or references.

    torch.distributed.checkpoint can read the shard file. Its layout (everything but the tensors' bytes) is made once.
    Later snapshots only copy the tensors' bytes, and no rank waits for another.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        whole: Whole,
        model_path: Path,
        base: Base | None = None,
        earlier: Callable[[], str] | None = None,
    ):
        """`model_path` is the folder of the initial model; `base` identifies the frozen weights, if only adapters are
        saved, and `earlier` computes their fingerprint in earlier versions."""
        self._model, self._optimizer, self._whole = model, optimizer, whole
        self._model_path, self._base, self._earlier = model_path, base, earlier
        self._laid_out: list[tuple[str, torch.Size, torch.dtype]] = []
        self._layout = Layout(copies=False)

    def take(self, optimizer_step: int, copy: bool) -> Files:
        """This rank's files. They are valid until the next call or, without a copy, until a tensor changes. The first
        call, and the first call with a copy, are collective. OSError names a trainer rank without memory for the copy.
        """
        tensors = _tensors(self._model, self._optimizer, self._whole)
        kinds = [(name, value.shape, value.dtype) for name, value in tensors.items()]
        if kinds != self._laid_out or (copy and not self._layout.copies):
            self._lay_out(tensors, copy)
            self._laid_out = kinds
        for name, place in self._layout.places.items() if copy else ():
            place.copy_(local(tensors[name]), non_blocking=True)
        wait()
        pieces = None if copy else Pieces(self._layout.size, self._layout.pieces(tensors))
        return self._layout.files(optimizer_step, pieces, self._base)

    def load(self, folder: Path) -> tuple[int, list[str]]:
        """Restore a checkpoint in place, on any number of ranks; returns (optimizer step, warnings). Collective.
        Buffers that it lacks, as checkpoints of deepspeed by earlier versions do, stay as they are. ValueError on every
        rank if the folder has no trainer checkpoint, another model's, or adapters of another base."""

        def load_tensors() -> None:
            stored = agreed(lambda: readable(folder, FileSystemReader(folder).read_metadata)).state_dict_metadata
            parameters = {f"model.{name}" for name, _ in self._model.named_parameters()}
            present = {
                name: value
                for name, value in tensors.items()
                if name in stored or name in parameters or name.startswith(STATE)
            }
            dcp.load(present, checkpoint_id=folder)

        tensors = _tensors(self._model, self._optimizer, self._whole)
        if not is_megatron(folder):
            return restore(folder, load_tensors, self._base, tensors.keys(), earlier=self._earlier)
        step, warned = restore(
            folder, lambda: _read_named(folder, self._model_path, tensors), self._base, of_other_engine=True
        )
        for name, value in tensors.items():
            if name.startswith(STATE) and name.endswith(".step"):
                value.fill_(step)
        return step, warned

    def _lay_out(self, tensors: dict[str, Tensor], copies: bool) -> None:
        self._layout = Layout(copies)
        self._layout.lay_out(tensors)


class Layout(StorageWriter):
    """The position of each tensor in this rank's shard file, whose `size` is 0 if the rank has nothing to write.

    Args:
        copies: Whether to allocate `shard`, the memory for a copy of the file. `places` then maps each name to its
            local part in `shard`, as a tensor.

    On rank 0, `metadata` is the content of .metadata.
    """

    def __init__(self, copies: bool) -> None:
        self.copies, self.size = copies, 0
        self.places: dict[str, Tensor] = {}
        self.shard: SharedFile | None = None
        self.metadata = b""
        self._frames: dict[str, tuple[bytes, bytes]] = {}  # in file order

    def lay_out(self, tensors: Mapping[str, Tensor]) -> None:
        """Assign each of this rank's tensors its position. Collective. OSError, with the cause's errno, names the rank
        that lacks memory; RuntimeError names the rank of any other failure."""
        try:
            dcp.save(dict(tensors), storage_writer=self)
        except CheckpointException as error:  # equal on all ranks; no Exception, and its text is several tracebacks
            rank, (cause, _) = next(iter(error.failures.items()))
            if isinstance(cause, OSError) and cause.errno in NO_ROOM:
                lacking = OSError(f"trainer rank {rank} has no room for a snapshot: {cause}")
                lacking.errno = cause.errno
                raise lacking from error
            text = f"{type(cause).__name__}: {cause}"
            raise RuntimeError(f"trainer rank {rank} cannot lay out a snapshot: {text}") from error

    def files(self, optimizer_step: int, pieces: Pieces | None = None, base: Base | None = None) -> Files:
        """This rank's files, with its random state. `pieces` is the shard file if there is no copy."""
        state = io.BytesIO()
        torch.save(random_state(), state)
        files: Files = {f"random_rank{dist.get_rank()}.pt": state.getvalue()}
        if self.size:
            shard = pieces or self.shard
            assert shard is not None, "a layout for copies has their memory"
            files[shard_name(dist.get_rank())] = shard
        if dist.get_rank() == 0:
            files |= {".metadata": self.metadata, FACTS: facts(optimizer_step, base)}
        return files

    def pieces(self, tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
        """The shard file's bytes in order. Tensors on a GPU are copied to the host one at a time."""
        for name, (head, tail) in self._frames.items():
            value = local(tensors[name]).detach().cpu().contiguous()
            yield memoryview(head)
            yield value.view(-1).view(torch.uint8).numpy().data
            yield memoryview(tail + bytes(-(len(head) + value.nbytes + len(tail)) % ALIGNMENT))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Part of StorageWriter: there is no folder yet."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Part of StorageWriter: all ranks do the same."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Lay out this rank's part of the plan."""
        framed = functools.cache(frame)
        values = {item.index: cast(Tensor, planner.resolve_data(item)) for item in plan.items}
        offsets, size = {}, 0
        for index, value in values.items():
            head, tail = framed(value.shape, value.dtype)
            offsets[index] = size
            size += -(-(len(head) + value.nbytes + len(tail)) // ALIGNMENT) * ALIGNMENT
        results = []
        self.size, self.shard = size, SharedFile(size) if size and self.copies else None
        whole = register(torch.frombuffer(self.shard.buffer, dtype=torch.uint8)) if self.shard is not None else None
        for index, offset in offsets.items():
            assert index.fqn not in self._frames, f"two parts of {index.fqn} on one rank"
            value = values[index]
            head, tail = self._frames[index.fqn] = framed(value.shape, value.dtype)
            start, end = offset + len(head), offset + len(head) + value.nbytes
            if self.shard is not None and whole is not None:
                self.shard.buffer[offset:start], self.shard.buffer[end : end + len(tail)] = head, tail
                self.places[index.fqn] = whole[start:end].view(value.dtype).view(value.shape)
            length = end + len(tail) - offset
            results.append(WriteResult(index, length, _StorageInfo(shard_name(dist.get_rank()), offset, length)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Store the metadata of all slices in all ranks' files. Called on rank 0."""
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        self.metadata = pickle.dumps(metadata)
