"""Tables of rows: one for each file format and one for generated tasks. Random access, no tokenizer, no torch."""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
import json
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from hpcrl.data.tasks import Task

PACKED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
}
"""First bytes of other formats that a file with a supported name may have."""
ENDINGS = {"gzip": ".gz", "zstd": ".zst", "parquet": ".parquet", "arrow": ".arrow"}
"""Format -> the file name ending with which it can be read."""
BATCH_ROWS = (256, 16, 1)
"""Rows of a parquet file to decode at once; fewer if needed: Arrow decodes at most 2 GiB of nested text at once."""
IMAGE_COLUMNS = ("images", "image")
"""Columns, and keys of messages, that may hold images."""


class BadRow(ValueError):
    """An unusable row; the message starts with its place, `file:line`."""


class Table(Protocol):
    """Rows as plain dicts. `digest` changes with the content. `fixed_domain` is the domain of all rows, if known. If
    `padded`, absent keys of nested values are null, as in Arrow."""

    fixed_domain: str | None
    padded: bool

    @property
    def digest(self) -> str: ...

    def __len__(self) -> int: ...

    def folder(self, index: int) -> Path:
        """The folder to which a row's paths are relative."""

    def row(self, index: int) -> dict[str, Any]:
        """The raw row; BadRow if it is unreadable."""

    def where(self, index: int) -> str:
        """`file:line`, for messages."""


def read_bytes(path: Path) -> bytes:
    """The content of a text file, unpacked if its name ends in .gz or .zst. ValueError if it has another format."""
    content = path.read_bytes()
    kind = next((name for magic, name in PACKED.items() if content.startswith(magic)), None)
    unpack = {".gz": gzip.decompress, ".zst": _unpack_zstd}.get(path.suffix)
    if kind is not None and (unpack is None or ENDINGS.get(kind) != path.suffix):
        remedy = f"name it {ENDINGS[kind]}" if kind in ENDINGS else "unpack it first"
        raise ValueError(f"{path}: this is a {kind} file, not lines of text; {remedy}")
    if unpack is None:
        return content
    try:
        return unpack(content)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: cannot be unpacked: {error}") from error


def _unpack_zstd(content: bytes) -> bytes:
    import pyarrow as arrow  # slow to import

    with arrow.CompressedInputStream(arrow.py_buffer(content), "zstd") as stream:
        unpacked: bytes = stream.read()
    return unpacked


class JsonTable:
    """One JSON object per line, or one array of objects; empty lines are skipped. The file is read once, rows are
    decoded on access."""

    fixed_domain: str | None = None
    padded = False

    def __init__(self, path: Path):
        self.path = path
        self._bytes = content = read_bytes(path)
        self._array: list[msgspec.Raw] | None = None
        if (start := content.removeprefix(b"\xef\xbb\xbf")).lstrip().startswith(b"["):
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # reading by lines names the wrong line
                self._array = msgspec.json.decode(start, type=list[msgspec.Raw])
        ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n"))
        starts = np.concatenate([[0], ends + 1])
        ends = np.concatenate([ends, [len(content)]])
        kept = [n for n, (a, b) in enumerate(zip(starts, ends, strict=True)) if content[a:b].strip()]
        self._lines = np.array(kept, dtype=np.int64)
        self._starts, self._ends = starts[self._lines], ends[self._lines]

    @cached_property
    def digest(self) -> str:
        return hashlib.blake2b(self._bytes, digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self._lines) if self._array is None else len(self._array)

    def row(self, index: int) -> dict[str, Any]:
        if self._array is not None:
            line = bytes(self._array[index])
        else:
            line = self._bytes[self._starts[index] : self._ends[index]].removeprefix(b"\xef\xbb\xbf")
            if line.lstrip().startswith(b"["):
                raise BadRow(f"{self.where(index)}: an array; write one object per line, or one array of all objects")
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRow(f"{self.where(index)}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise BadRow(f"{self.where(index)}: {line[:40].decode(errors='replace').strip()} is not an object")
        return row

    def where(self, index: int) -> str:
        if self._array is not None:
            return f"{self.path}:row {index}"
        return f"{self.path}:{self._lines[index] + 1}"

    def folder(self, index: int) -> Path:
        return self.path.parent


class CsvTable:
    """Comma- or tab-separated values under a line of column names. All values are text; an empty one is null."""

    fixed_domain: str | None = None
    padded = False

    def __init__(self, path: Path, delimiter: str):
        self.path = path
        self._bytes = read_bytes(path)
        try:
            text = self._bytes.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
        csv.field_size_limit(1 << 30)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        self._rows: list[tuple[int, list[str]]] = []
        start = 1
        try:
            for values in reader:
                if values:
                    self._rows.append((start, values))
                start = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(f"{path}:{start}: not a row of values: {error}") from error
        self._columns = self._rows.pop(0)[1] if self._rows else []
        if twice := next((name for name in self._columns if self._columns.count(name) > 1), None):
            raise ValueError(f"{path}: two columns are named {twice!r}")

    @cached_property
    def digest(self) -> str:
        return hashlib.blake2b(self._bytes, digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        values = self._rows[index][1]
        if len(values) != len(self._columns):
            raise BadRow(
                f"{self.where(index)}: {len(values)} values, but the first line names {len(self._columns)} columns"
            )
        return {name: value or None for name, value in zip(self._columns, values, strict=True)}

    def where(self, index: int) -> str:
        return f"{self.path}:{self._rows[index][0]}"

    def folder(self, index: int) -> Path:
        return self.path.parent


class ArrowTable:
    """A parquet file, or an Arrow file or stream (of `datasets`), from any writer. Dates and decimals become text, NaN
    becomes null, since pandas writes missing numbers as NaN."""

    fixed_domain: str | None = None
    padded = True

    def __init__(self, path: Path):
        import pyarrow as arrow  # slow to import, and not every run has such files

        self.path = path
        kind = path.suffix.removeprefix(".")
        try:
            schema, self._batches = (_parquet_batches if kind == "parquet" else _arrow_batches)(path)
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(f"{path}: not a readable {kind} file: {str(error).splitlines()[0]}") from error
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        self._has_bytes = any("binary" in str(column.type) for column in schema)

    @cached_property
    def digest(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, index: int) -> dict[str, Any]:
        batch = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = self._batches[batch].slice(index - int(self._starts[batch]), 1).to_pylist()[0]
        try:
            # Dates and decimals become text: a row's columns are sent between ranks.
            row = msgspec.to_builtins(row, builtin_types=(bytes,))
        except (TypeError, msgspec.ValidationError) as error:
            raise BadRow(f"{self.where(index)}: {error}") from error
        row = {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}
        return {key: self._as_text(value, index, key) for key, value in row.items()} if self._has_bytes else row

    def _as_text(self, value: Any, index: int, column: str) -> Any:
        """Decode bytes as text, since some parquet writers have no text type. The content of images is unchanged."""
        if isinstance(value, bytes):
            name, _, inner = column.partition(".")
            if name in IMAGE_COLUMNS and inner == "bytes":
                return value
            try:
                return value.decode()
            except UnicodeDecodeError as error:
                if name in IMAGE_COLUMNS:
                    return value
                text = "holds bytes that are not UTF-8; leave the column out, or store text"
                raise BadRow(f"{self.where(index)}: {column} {text}") from error
        if isinstance(value, dict):
            return {key: self._as_text(inner, index, f"{column}.{key}") for key, inner in value.items()}
        return [self._as_text(inner, index, column) for inner in value] if isinstance(value, list) else value

    def where(self, index: int) -> str:
        return f"{self.path}:row {index}"

    def folder(self, index: int) -> Path:
        return self.path.parent


def _parquet_batches(path: Path) -> tuple[Any, list[Any]]:
    """Schema and record batches of a parquet file."""
    import pyarrow as arrow
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        for num_rows in BATCH_ROWS:
            with contextlib.suppress(*([arrow.ArrowNotImplementedError] if num_rows > 1 else [])):
                return file.schema_arrow, [batch for batch in file.iter_batches(num_rows) if batch.num_rows]
    raise AssertionError("the smallest batches are read or raise")


def _arrow_batches(path: Path) -> tuple[Any, list[Any]]:
    """Schema and record batches of an Arrow file or stream, memory-mapped without a copy."""
    import pyarrow as arrow

    source = arrow.memory_map(str(path))
    try:
        opened = arrow.ipc.open_stream(source)
    except arrow.ArrowInvalid:
        opened = arrow.ipc.open_file(source)
        batches = [opened.get_batch(n) for n in range(opened.num_record_batches)]
    else:
        batches = list(opened)
    return opened.schema, [batch for batch in batches if batch.num_rows]


class ShardedTable:
    """The rows of several files, file after file."""

    fixed_domain: str | None = None

    def __init__(self, path: str, shards: Sequence[Table]):
        self.path, self.shards = path, shards
        self.padded = any(shard.padded for shard in shards)
        self._starts = np.cumsum([0, *map(len, shards)])

    @cached_property
    def digest(self) -> str:
        return hashlib.blake2b("".join(shard.digest for shard in self.shards).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _locate(self, index: int) -> tuple[Table, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.shards[number], index - int(self._starts[number])

    def row(self, index: int) -> dict[str, Any]:
        shard, place = self._locate(index)
        return shard.row(place)

    def where(self, index: int) -> str:
        shard, place = self._locate(index)
        return shard.where(place)

    def folder(self, index: int) -> Path:
        shard, place = self._locate(index)
        return shard.folder(place)


class TaskTable:
    """The rows of a generated task."""

    padded = False

    def __init__(self, task: Task, path: str, seed: int, options: dict[str, Any]):
        self.task = task
        self.path = path
        self.fixed_domain: str | None = task.name
        facts = json.dumps([path, seed, task.size, options], sort_keys=True)
        self.digest = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self.task.size

    def row(self, index: int) -> dict[str, Any]:
        return self.task.row(index)

    def where(self, index: int) -> str:
        return f"{self.path}[{index}]"

    def folder(self, index: int) -> Path:
        return Path()


FORMATS: dict[str, Callable[[Path], Table]] = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), JsonTable),
    ".csv": lambda path: CsvTable(path, ","),
    ".tsv": lambda path: CsvTable(path, "\t"),
    **dict.fromkeys((".parquet", ".arrow"), ArrowTable),
}
"""Ending of a file -> its table."""
UNPACKED = (".gz", ".zst")


def ending(path: Path) -> str:
    """The file name ending that determines the format, without .gz or .zst."""
    packed = path.suffix in UNPACKED
    found = path.with_suffix("").suffix if packed else path.suffix
    return "" if packed and FORMATS.get(found) is ArrowTable else found


def open_file(path: Path) -> Table:
    """The rows of a file. ValueError if it cannot be read."""
    if ending(path) not in FORMATS:
        known = ", ".join(FORMATS)
        raise ValueError(f"{path}: unknown format {path.suffix!r}; {known} are read, text also with .gz or .zst")
    return FORMATS[ending(path)](path)
