"""Weight files in HF layout: their headers, and tensors that are read row by row."""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcrl.checkpoint.shards import bytes_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
CODES = {dtype: code for code, dtype in DTYPES.items()}
ALIGNMENT = 8  # bytes; alignment of the first value in a file
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


class TensorPlace(NamedTuple):
    """Location of a tensor in a file, from byte `offset` on."""

    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes per index of the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class WeightFiles:
    """The tensors of a model folder by name. ValueError if a file is missing or damaged, or has other dtypes than
    DTYPES and `others`, which maps further safetensors dtypes to torch's."""

    def __init__(self, folder: Path, others: Mapping[str, torch.dtype] | None = None):
        self.folder = folder
        known = {**DTYPES, **(others or {})}
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        self.tensors: dict[str, TensorPlace] = {}
        for name in _file_names(folder):
            self.tensors |= _header(folder / name, known)

    def read(self, name: str, first: int, last: int) -> Tensor:
        """Rows of a tensor."""
        place = self.tensors[name]
        result = torch.empty((last - first, *place.shape[1:]), dtype=place.dtype)
        buffer, offset = bytes_of(result), place.offset + first * place.row_bytes
        with self._lock:
            if place.file not in self._files:
                self._files[place.file] = os.open(self.folder / place.file, os.O_RDONLY)
        while buffer:
            count = os.preadv(self._files[place.file], [buffer], offset)
            if not count:
                raise ValueError(f"{self.folder / place.file} is damaged: it ends at byte {offset}")
            buffer, offset = buffer[count:], offset + count
        return result

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()


def header(tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these tensors (shape, dtype), and the offset of each tensor."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, starts = 0, {}
    for name, (shape, dtype) in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        starts[name], at = at, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    begin = struct.pack("<Q", len(text)) + text
    return begin, {name: len(begin) + start for name, start in starts.items()}


def _file_names(folder: Path) -> list[str]:
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()), key=str)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is damaged: {error}") from error
    else:
        names = [path.name for path in sorted(folder.glob("*.safetensors"))]
    if not names:
        raise ValueError(f"{folder} has no weights in safetensors files")
    for name in names:
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ValueError(f"{index} is refused: it names {name!r}, which is not a file of the folder")
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing, but {INDEX} names it")
    return names


def _check_bytes(name: str, entry: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """ValueError if the size of a tensor's data does not match its dtype and shape."""
    first, last = entry["data_offsets"]
    sizes = [first, last, *entry["shape"]]
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{name} has sizes {sizes}")
    dtype = dtypes.get(entry["dtype"])
    if dtype is not None and last - first != math.prod(entry["shape"]) * dtype.itemsize:
        raise ValueError(f"{name} has {last - first} bytes, which is not {entry['dtype']} {entry['shape']}")


def _header(path: Path, dtypes: Mapping[str, torch.dtype]) -> dict[str, TensorPlace]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            size = path.stat().st_size
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"its header claims {length} bytes")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if end != size:
            raise ValueError(f"it has {size} bytes and should have {end}")
        wrong = next((n for n, entry in entries.items() if entry["dtype"] not in dtypes), None)
        for name, entry in entries.items():
            _check_bytes(name, entry, dtypes)
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if wrong is not None:
        kind = entries[wrong]["dtype"]
        raise ValueError(f"{path}: {wrong} is {kind}; only {', '.join(dtypes)} can be converted")
    return {
        name: TensorPlace(
            path.name, 8 + length + entry["data_offsets"][0], tuple(entry["shape"]) or (1,), dtypes[entry["dtype"]]
        )
        for name, entry in entries.items()
    }
