"""Sources of rows: jsonl and parquet files, generated tasks. Random access by index, no tokenizer, no torch."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from hpcrl.config import DataSource
from hpcrl.data.tasks import Split, Task, is_generated, make_task

PACKED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "parquet",
}
"""First bytes of other formats that a file with a supported name may have."""
NO_IMAGES = "images cannot be trained by this version; use rows of text only"


class BadRow(ValueError):
    """An unusable row; the message starts with its place, `file:line`."""


class Table(Protocol):
    """Rows as plain dicts. `digest` changes with the content. `fixed_domain`: the domain of all rows, if known."""

    fixed_domain: str | None

    @property
    def digest(self) -> str: ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """The raw row; BadRow if it is unreadable."""

    def where(self, index: int) -> str:
        """`file:line`, for messages."""


class JsonlTable:
    """One JSON object per line; empty lines are skipped. The file is read once, rows are decoded on access."""

    fixed_domain: str | None = None

    def __init__(self, path: Path):
        self.path = path
        self._bytes = path.read_bytes()
        if kind := next((name for magic, name in PACKED.items() if self._bytes.startswith(magic)), None):
            way_out = "name it .parquet" if kind == "parquet" else "unpack it first"
            raise ValueError(f"{path}: this is a {kind} file, not lines of JSON; {way_out}")
        ends = np.flatnonzero(np.frombuffer(self._bytes, np.uint8) == ord("\n"))
        starts = np.concatenate([[0], ends + 1])
        ends = np.concatenate([ends, [len(self._bytes)]])
        kept = [n for n, (a, b) in enumerate(zip(starts, ends, strict=True)) if self._bytes[a:b].strip()]
        self._lines = np.array(kept, dtype=np.int64)
        self._starts, self._ends = starts[self._lines], ends[self._lines]

    @cached_property
    def digest(self) -> str:
        return hashlib.blake2b(self._bytes, digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, index: int) -> dict[str, Any]:
        line = self._bytes[self._starts[index] : self._ends[index]].removeprefix(b"\xef\xbb\xbf")
        if line.lstrip().startswith(b"["):
            raise BadRow(f"{self.where(index)}: an array; write one object per line (jsonl)")
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRow(f"{self.where(index)}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise BadRow(f"{self.where(index)}: {line[:40].decode(errors='replace').strip()} is not an object")
        return row

    def where(self, index: int) -> str:
        return f"{self.path}:{self._lines[index] + 1}"


class ParquetTable:
    """A parquet file (verl's layout or any other with the keys of a jsonl file)."""

    fixed_domain: str | None = None

    def __init__(self, path: Path):
        import pyarrow as arrow  # slow to import, and not every run has parquet files
        from pyarrow import parquet

        self.path = path
        try:
            self._table = parquet.read_table(path).combine_chunks()
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(f"{path}: not a parquet file: {str(error).splitlines()[0]}") from error
        self._has_bytes = any("binary" in str(column.type) for column in self._table.schema)

    @cached_property
    def digest(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> dict[str, Any]:
        row = self._table.slice(index, 1).to_pylist()[0]
        try:
            # Dates and decimals become text: a row's columns are sent between ranks.
            row = msgspec.to_builtins(row, builtin_types=(bytes,))
        except (TypeError, msgspec.ValidationError) as error:
            raise BadRow(f"{self.where(index)}: {error}") from error
        return {key: self._as_text(value, index, key) for key, value in row.items()} if self._has_bytes else row

    def _as_text(self, value: Any, index: int, column: str) -> Any:
        """Decode bytes as text: some parquet writers have no text type."""
        if isinstance(value, bytes):
            try:
                return value.decode()
            except UnicodeDecodeError as error:
                text = " holds bytes that are not UTF-8; leave the column out, or store text"
                if column.partition(".")[0] in ("image", "images"):
                    text = f": {NO_IMAGES}"
                raise BadRow(f"{self.where(index)}: {column}{text}") from error
        if isinstance(value, dict):
            return {key: self._as_text(inner, index, f"{column}.{key}") for key, inner in value.items()}
        return [self._as_text(inner, index, column) for inner in value] if isinstance(value, list) else value

    def where(self, index: int) -> str:
        return f"{self.path}:row {index}"


class TaskTable:
    """The rows of a generated task."""

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


def open_table(source: DataSource, seed: int, split: Split) -> Table:
    """The rows of a source. ValueError describes an error of the source as a whole."""
    if is_generated(source.path):
        task = make_task(source.path, source.options, source.size, seed, split)
        task.row(0)  # errors in the options appear in the first row
        return TaskTable(task, source.path, seed, source.options)
    path = Path(source.path).expanduser()
    try:
        there = path.exists()
    except OSError as error:
        raise ValueError(f"{source.path}: {error.strerror}") from error
    if not there:
        raise ValueError(f"{source.path}: no such file")
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"{source.path}: not a regular file")
    if not path.is_file():
        raise ValueError(f"{source.path}: a folder; give a jsonl or parquet file, or a list of them")
    for key in ("size", "options"):
        if getattr(source, key):
            raise ValueError(f"{source.path}: {key} is for generated sources (task:, reasoning_gym:) only")
    if path.suffix == ".parquet":
        table: Table = ParquetTable(path)
    elif path.suffix in (".jsonl", ".json", ".ndjson"):
        table = JsonlTable(path)
    else:
        raise ValueError(f"{source.path}: unknown format {path.suffix!r}; .jsonl and .parquet are read")
    if not len(table):
        raise ValueError(f"{source.path}: holds no rows")
    return table
