"""Files of rows: what is written is read back, whatever the values; nothing is replaced."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import DataConfig, DataSource
from hpcrl.data import read_splits
from hpcrl.data.places import open_table
from hpcrl.data.row_files import BATCH_ROWS, digest_of, publish, write_rows

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": None, "y": [1, "a"]}}}


def messages(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": text, **more}]


PLAIN = [
    {"messages": messages("a\u2028b\n\u00e9"), "tag": "x", "answer": "1", "score": 1.0, "tokens": 3},
    {"messages": messages("b", weight=0) + messages("c"), "tag": "y", "answer": "2", "score": 0, "tokens": 4},
]
MIXED = [
    {"messages": messages("a"), "answer": [1, {"k": 2}], "tools": [{"name": "f"}]},
    {"messages": messages("", tool_calls=[CALL]), "answer": "text", "big": 1 << 70},
    {"messages": messages("c"), "answer": None},
]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("rows", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_rows_are_read_back_with_their_messages(tmp_path: Path, ending: str, rows: list[dict[str, Any]]) -> None:
    path = tmp_path / f"rows.{ending}"
    digest = write_rows(path, lambda: rows)
    assert digest == digest_of(path)
    found, wrong = read_splits(DataConfig(train=str(path)), 0)
    assert not wrong and len(found["train"]) == len(rows)
    for number, row in enumerate(rows):
        read = found["train"].row(number)
        assert read.turn is not None
        known = [{name: value for name, value in each.items() if value is not None} for each in row["messages"]]
        assert [*read.messages, read.turn] == known
        if isinstance(row.get("answer"), str):
            assert read.answer == row["answer"]
        assert read.tools == (row.get("tools") or None)


def test_a_parquet_file_has_plain_types_where_values_allow_it(tmp_path: Path) -> None:
    from pyarrow import parquet

    write_rows(path := tmp_path / "rows.parquet", lambda: PLAIN)
    schema = parquet.read_schema(path)
    assert [str(schema.field(name).type) for name in ("score", "tokens", "tag")] == ["double", "int64", "string"]
    assert str(schema.field("messages").type).startswith("list<")
    write_rows(path, lambda: MIXED)
    assert json.loads(open_table(DataSource(path=str(path)), 0, "train").row(0)["answer"]) == [1, {"k": 2}]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_many_rows_and_none_at_all(tmp_path: Path, ending: str) -> None:
    """A column may begin in any batch."""
    path, count = tmp_path / f"rows.{ending}", 2 * BATCH_ROWS + 1

    def rows() -> Iterator[dict[str, Any]]:
        for n in range(count):
            yield {"messages": messages(str(n))} | ({"late": n} if n == count - 1 else {})

    calls: list[int] = []
    write_rows(path, rows, lambda: calls.append(1))
    table = open_table(DataSource(path=str(path)), 0, "train")
    assert len(table) == count and table.row(count - 1)["late"] == count - 1 and len(calls) >= 3
    write_rows(path, lambda: [])
    assert path.exists()


def test_text_that_no_reader_accepts_is_replaced(tmp_path: Path) -> None:
    write_rows(path := tmp_path / "rows.jsonl", lambda: [{"messages": messages("a\ud800b")}])
    found, wrong = read_splits(DataConfig(train=str(path)), 0)
    turn = found["train"].row(0).turn
    assert not wrong and turn is not None and turn["content"] == "a?b"


def test_a_file_that_cannot_be_completed_is_removed(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield {"messages": messages("a")}
        raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(OSError, match=r"rows\.jsonl"):
        write_rows(tmp_path / "rows.jsonl", rows)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("links", [True, False])
def test_a_name_that_is_taken_keeps_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """Also on a file system without hard links."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    (first := tmp_path / "first").write_text("1")
    (second := tmp_path / "second").write_text("2")
    publish(first, target := tmp_path / "target")
    assert target.read_text() == "1" and not first.exists()
    with pytest.raises(FileExistsError):
        publish(second, target)
    assert target.read_text() == "1" and second.exists()
