"""Read slices of torch.distributed.checkpoint checkpoints, which include Megatron's torch_dist, without a process group
or Megatron. Only the requested slice of a tensor is in memory."""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import struct
import threading
import zipfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from hpcrl.checkpoint.commit import METADATA
from hpcrl.spec.weight_layout import TensorSlice, intersection

KNOWN = {
    "torch": {"Size", "device"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}
"""Classes that a checkpoint's metadata may name. A pickle with other classes could run any code, and is refused."""
STAND_INS = {"megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"}}
"""Megatron's own classes, whose content is not needed."""


class _StandIn:
    """Accepts and ignores the state of a class that is not installed."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in STAND_INS.get(module, ()):
            return _StandIn
        if name in KNOWN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise ValueError(f"it names {module}.{name}, which no checkpoint needs")


STORAGES = {
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
BLOCK_BYTES = 1 << 20
MAX_PICKLE_BYTES = 1 << 20
"""Maximum size of the pickle that describes one tensor."""


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: its slice, and the range of its file that torch.save wrote for it."""

    tensor_slice: TensorSlice
    file: str
    offset: int
    length: int


class Stored(NamedTuple):
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[Chunk]


class ShardedCheckpoint:
    """The tensors of a checkpoint folder, for concurrent reads. ValueError if metadata or shards are missing, or shards
    are too short."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tensors = _tensors(folder)
        self._by_index: dict[str, dict[tuple[int, ...] | None, list[Chunk]]] = {}
        self._files: dict[str, int] = {}
        self._starts: dict[tuple[str, int], int | None] = {}
        self._lock = threading.Lock()

    def read(self, name: str, tensor_slice: TensorSlice) -> Tensor:
        """The values in a slice of a tensor. ValueError if shards lack some values, or a shard is damaged."""
        shape, dtype, _ = self.tensors[name]
        result = torch.empty([last - first for first, last in tensor_slice], dtype=dtype)
        found = 0
        for chunk in self._near(name, tensor_slice):
            shared = intersection(tensor_slice, chunk.tensor_slice)
            if shared is not None:
                place = result[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(shared, tensor_slice, strict=True))]
                self._fill(place, name, chunk, shared)
                found += place.numel()
        if found < result.numel():
            raise ValueError(f"{self.folder}: no shard has part {_text(tensor_slice)} of {name} {list(shape)}")
        return result

    def check_sums(self, names: Collection[str], report_progress: Callable[[], None]) -> None:
        """Read these tensors' shards and compare them with the CRC-32 checksums that torch.save stored (hpcrl's
        checkpoints have a manifest with hashes instead). ValueError names a damaged shard's file. `report_progress` is
        called before each shard; its exception ends the check."""
        for name in sorted(names):
            for chunk in self.tensors[name].chunks:
                report_progress()
                try:
                    with zipfile.ZipFile(self._view(chunk)) as archive:
                        wrong = next(
                            (e.filename for e in archive.infolist() if e.CRC and not _is_right(archive, e)), None
                        )
                except Exception as error:  # a damaged archive may raise anything
                    wrong = f"{type(error).__name__}: {error}"
                if wrong is not None:
                    last = chunk.offset + chunk.length
                    where = f"{self.folder / chunk.file} is damaged between byte {chunk.offset} and {last}"
                    raise ValueError(f"{where} ({name} {_text(chunk.tensor_slice)}): its checksum is wrong ({wrong})")

    def _near(self, name: str, tensor_slice: TensorSlice) -> list[Chunk]:
        """The chunks of a tensor that may overlap a slice. They are looked up by the slice's first index in the leading
        dimensions, since the experts of a large model are ten thousand chunks of one tensor."""
        with self._lock:
            if name not in self._by_index:
                shape, _, chunks = self.tensors[name]
                if sum(math.prod(last - first for first, last in chunk.tensor_slice) for chunk in chunks) != math.prod(
                    shape
                ):
                    raise ValueError(f"{self.folder}: the shards of {name} {list(shape)} overlap or lack a part")
                index: dict[tuple[int, ...] | None, list[Chunk]] = {}
                for chunk in self.tensors[name].chunks:
                    index.setdefault(_single(chunk.tensor_slice), []).append(chunk)
                self._by_index[name] = index
        index = self._by_index[name]
        at = _single(tensor_slice)
        if at is None:
            return self.tensors[name].chunks
        return [*index.get(at, ()), *index.get(None, ())]

    def _fill(self, place: Tensor, name: str, chunk: Chunk, shared: TensorSlice) -> None:
        inside = tuple((a - c, b - c) for (a, b), (c, _) in zip(shared, chunk.tensor_slice, strict=True))
        sizes = [b - a for a, b in chunk.tensor_slice]
        start = self._start(name, chunk)
        if start is None:
            try:
                loaded = torch.load(self._view(chunk), weights_only=True, map_location="cpu")
                place.copy_(loaded[tuple(slice(a, b) for a, b in inside)])
            except Exception as error:  # a damaged archive may raise anything
                where = f"{self.folder / chunk.file} is damaged at byte {chunk.offset}"
                raise ValueError(f"{where} ({name}): {' '.join(str(error).split())[:200]}") from error
            return
        axis = max((n for n, (a, b) in enumerate(inside) if b - a < sizes[n]), default=0)
        for leading in itertools.product(*(range(a, b) for a, b in inside[:axis])):
            target = place[tuple(i - a for i, (a, _) in zip(leading, inside, strict=False))]
            first = 0
            for i, size in zip((*leading, inside[axis][0]), sizes, strict=False):
                first = first * size + i
            for size in sizes[axis + 1 :]:
                first *= size
            self._numbers(target, chunk, start + first * place.element_size())

    def _numbers(self, target: Tensor, chunk: Chunk, offset: int) -> None:
        """Read consecutive values of a file."""
        direct = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        buffer = bytes_of(direct)
        descriptor = self._file(chunk.file)
        while buffer:
            count = os.preadv(descriptor, [buffer], offset)
            if not count:
                raise ValueError(f"{self.folder / chunk.file} is damaged: it ends at byte {offset}")
            buffer, offset = buffer[count:], offset + count
        if direct is not target:
            target.copy_(direct)

    def _start(self, name: str, chunk: Chunk) -> int | None:
        """Offset of a chunk's values in its file; None if they are not in row-major order."""
        place = (chunk.file, chunk.offset)
        if place not in self._starts:
            stored, sizes = self.tensors[name], tuple(b - a for a, b in chunk.tensor_slice)
            try:
                head = _head(self._view(chunk))
                if head.shape != sizes or head.dtype != stored.dtype:
                    raise ValueError(f"it has {head.dtype} {list(head.shape)}")
            except Exception as error:  # a damaged archive may raise anything
                text = " ".join(str(error).split())[:200]
                where = f"{self.folder / chunk.file} is damaged at byte {chunk.offset}"
                raise ValueError(f"{where} ({name} {_text(chunk.tensor_slice)}): {text}") from error
            self._starts[place] = chunk.offset + head.start if head.contiguous else None
        return self._starts[place]

    def _view(self, chunk: Chunk) -> IO[bytes]:
        return cast(IO[bytes], _View(self._file(chunk.file), chunk.offset, chunk.length))

    def _file(self, name: str) -> int:
        with self._lock:
            if name not in self._files:
                self._files[name] = os.open(self.folder / name, os.O_RDONLY)
            return self._files[name]

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()


def _is_right(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bool:
    """Whether an entry's content matches its checksum."""
    try:
        with archive.open(entry) as file:
            while file.read(BLOCK_BYTES):
                pass
    except zipfile.BadZipFile:
        return False
    return True


class _Head(NamedTuple):
    """torch.save's description of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    contiguous: bool
    start: int  # offset of the values' first byte


class _HeadUnpickler(pickle.Unpickler):
    """Reads torch.save's pickle without creating the tensor, which would take ten times as long."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: (storage, offset, size, stride)
        if (module, name) == ("collections", "OrderedDict"):
            return super().find_class(module, name)
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise ValueError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _head(file: IO[bytes]) -> _Head:
    with zipfile.ZipFile(file) as archive:
        (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        if archive.getinfo(pickled).file_size > MAX_PICKLE_BYTES:
            raise ValueError(f"its description claims {archive.getinfo(pickled).file_size} bytes")
        storage, offset, size, stride = _HeadUnpickler(io.BytesIO(archive.read(pickled))).load()
        _, dtype, key, _, count = storage
        entry = archive.getinfo(f"{pickled.removesuffix('data.pkl')}data/{key}")
    file.seek(entry.header_offset)
    fields = struct.unpack("<4s5H3I2H", file.read(30))
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != count * dtype.itemsize:
        raise ValueError(f"its numbers have {entry.file_size} bytes")
    expected: list[int] = []
    step = 1
    for length in reversed(size):
        expected.insert(0, step)
        step *= length
    same = all(a == b for a, b, length in zip(expected, stride, size, strict=True) if length > 1)
    if offset + step > count and same:
        raise ValueError(f"it has {count} numbers")
    start = entry.header_offset + 30 + fields[9] + fields[10] + offset * dtype.itemsize
    return _Head(tuple(size), dtype, same, start)


class _View(io.RawIOBase):
    """A part of a file as a file object with its own position."""

    def __init__(self, descriptor: int, offset: int, length: int):
        self._descriptor, self._offset, self._length, self._at = descriptor, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        rest = max(0, self._length - self._at)
        count = os.preadv(self._descriptor, [memoryview(buffer)[:rest]], self._offset + self._at)
        self._at += count
        return count


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return cast(memoryview, tensor.view(-1).view(torch.uint8).numpy().data)


def _single(tensor_slice: TensorSlice) -> tuple[int, ...] | None:
    """The leading index of a slice within one matrix of a stack; None if it spans several, or there is no stack."""
    leading = tensor_slice[:-2] or tensor_slice[:-1]
    if not leading or any(last - first != 1 for first, last in leading):
        return None
    return tuple(first for first, _ in leading)


def _text(tensor_slice: TensorSlice) -> str:
    return "[" + ", ".join(f"{first}:{last}" for first, last in tensor_slice) + "]"


def _tensors(folder: Path) -> dict[str, Stored]:
    try:
        with open(folder / METADATA, "rb") as file:
            metadata = _Unpickler(file).load()
        entries, storage = metadata.state_dict_metadata, metadata.storage_data
        found = {name: _stored(name, entry, storage) for name, entry in entries.items() if hasattr(entry, "chunks")}
    except FileNotFoundError as error:
        raise ValueError(f"{folder} has no {METADATA}: not a checkpoint of torch.distributed.checkpoint") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / METADATA} is refused: {' '.join(str(error).split())}") from error
    except Exception as error:  # a damaged pickle raises anything
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"{folder / METADATA} is damaged ({text})") from error
    _check_files(folder, found)
    return found


def _stored(name: str, entry: Any, storage: Any) -> Stored:
    chunks = []
    by_offset = {tuple(chunk.offsets): chunk for chunk in entry.chunks}
    for offsets, chunk in by_offset.items():
        place = storage[MetadataIndex(name, offsets)]
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"{name} is stored through {place.transform_descriptors}, which is not supported")
        tensor_slice = tuple(
            (int(first), int(first) + int(size)) for first, size in zip(offsets, chunk.sizes, strict=True)
        )
        chunks.append(Chunk(tensor_slice, str(place.relative_path), int(place.offset), int(place.length)))
    return Stored(tuple(map(int, entry.size)), entry.properties.dtype, chunks)


def _check_files(folder: Path, tensors: dict[str, Stored]) -> None:
    ends: dict[str, int] = {}
    for chunk in itertools.chain.from_iterable(stored.chunks for stored in tensors.values()):
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
    for name, end in sorted(ends.items()):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{folder / METADATA} is refused: it names the file {name}, which is not in the folder")
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing: {folder} is incomplete ({len(ends)} files of shards)")
        if (size := (folder / name).stat().st_size) < end:
            raise ValueError(f"{folder / name} is damaged: it has {size} bytes, {METADATA} says at least {end}")
