"""Writes rows to a jsonl or parquet file that hpcrl.data reads: in bounded memory, and complete or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hpcrl.system.files import fsync_path, naming

BATCH_ROWS = 1024
"""Rows of a parquet file that are converted at once."""
PLAIN_KEYS = {"role", "content", "weight"}
"""Keys of messages for which a parquet file has a nested type; a column of other messages is JSON text."""
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of file systems without hard links."""
RowSource = Callable[[], Iterable[Mapping[str, Any]]]
"""Yields all rows; a parquet file reads them twice."""


def write_rows(path: Path, rows: RowSource, report_progress: Callable[[], None] = lambda: None) -> str:
    """Write rows to a file of the type that `path.suffix` names, replacing it, and sync it; returns the SHA-256 of its
    content. OSError names the file; then no file is left. report_progress() is called every BATCH_ROWS rows."""
    try:
        with naming(path):
            if path.suffix == ".parquet":
                _write_parquet(path, rows, report_progress)
            else:
                _write_lines(path, rows, report_progress)
            fsync_path(path)
            return digest_of(path)
    except BaseException:
        path.unlink(missing_ok=True)  # a partial file would keep a full disk full
        raise


def as_line(row: Mapping[str, Any]) -> bytes:
    """A row as a line of JSON in UTF-8. A lone surrogate, which no reader accepts, becomes a question mark."""
    return json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n"


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's content. OSError if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish(source: Path, target: Path) -> None:
    """Give a complete file its final name. FileExistsError if the name is taken; then the file keeps its own."""
    try:
        os.link(source, target)  # unlike a rename, it never replaces a file
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.rename(source, target)
    fsync_path(target.parent)
    source.unlink(missing_ok=True)


def _batches(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    left = iter(rows)
    while some := list(islice(left, BATCH_ROWS)):
        yield some


def _write_lines(path: Path, rows: RowSource, report_progress: Callable[[], None]) -> None:
    with path.open("wb") as file:
        for some in _batches(rows()):
            report_progress()
            file.write(b"".join(map(as_line, some)))


def _write_parquet(path: Path, rows: RowSource, report_progress: Callable[[], None]) -> None:
    import pyarrow as arrow  # slow to import
    from pyarrow import parquet

    kinds: dict[str, set[str]] = {}
    for some in _batches(rows()):
        report_progress()
        for name, value in ((name, value) for row in some for name, value in row.items()):
            kinds.setdefault(name, set()).add(_kind(value))
    types = {name: _arrow_type(found) for name, found in kinds.items()}
    schema = arrow.schema([(name, found or arrow.string()) for name, found in types.items()])
    with parquet.ParquetWriter(path, schema) as writer:
        for some in _batches(rows()):
            report_progress()
            columns = {name: [*_values(some, name, as_json=found is None)] for name, found in types.items()}
            writer.write_table(arrow.table(columns, schema))


def _kind(value: Any) -> str:
    """What a parquet column must hold for this value: null, bool, int, float, str, messages or other."""
    if value is None:
        return "null"
    if isinstance(value, list) and value and all(map(_is_plain, value)):
        return "messages"
    if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 63) <= value < 1 << 63:
        return "other"
    name = type(value).__name__
    return name if name in ("bool", "int", "float", "str") else "other"


def _is_plain(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and {"role", "content"} <= message.keys() <= PLAIN_KEYS
        and isinstance(message["role"], str)
        and isinstance(message["content"], str)
        and type(message.get("weight", 0)) is int
    )


def _arrow_type(kinds: set[str]) -> Any:
    """The type of a column with values of these kinds; None: JSON text."""
    import pyarrow as arrow

    turn = arrow.struct([("role", arrow.string()), ("content", arrow.string()), ("weight", arrow.int64())])
    of_kind = {
        "bool": arrow.bool_(),
        "int": arrow.int64(),
        "float": arrow.float64(),
        "str": arrow.string(),
        "messages": arrow.list_(turn),
    }
    kinds = kinds - {"null"}
    if kinds == {"int", "float"}:
        return arrow.float64()
    return of_kind.get(*kinds) if len(kinds) == 1 else arrow.string() if not kinds else None


def _values(rows: Sequence[Mapping[str, Any]], name: str, as_json: bool) -> Iterator[Any]:
    """The column's values; with `as_json` all values but texts and nulls as JSON text."""
    for row in rows:
        value = row.get(name)
        text = as_json and not isinstance(value, str | None)
        yield json.dumps(_with_written_arguments(value), ensure_ascii=False) if text else value


def _with_written_arguments(value: Any) -> Any:
    """The value with the arguments of calls as JSON text, OpenAI's form: in a parquet file, a null is an absent key."""
    if isinstance(value, list):
        return [_with_written_arguments(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    found = {key: _with_written_arguments(inner) for key, inner in value.items()}
    if "name" in value and isinstance(value.get("arguments"), dict):
        found["arguments"] = json.dumps(value["arguments"], ensure_ascii=False)
    return found
