"""A rank's share of a checkpoint's files, which it verifies while it serves commands."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from hpcrl.checkpoint.check import FileCheck
from hpcrl.checkpoint.commit import READ_BYTES, FileEntry


def written(folder: Path, name: str, size: int) -> FileEntry:
    content = os.urandom(size)
    (folder / name).write_bytes(content)
    return FileEntry(name, size, hashlib.sha256(content).hexdigest())


def test_the_first_damaged_file_is_named_and_bytes_are_counted(tmp_path: Path) -> None:
    entries = [written(tmp_path, "a", 2 * READ_BYTES + 5), written(tmp_path, "b", 7), written(tmp_path, "c", 9)]
    whole = FileCheck(tmp_path, entries)
    assert whole.result(60) == "" and whole.progress() == (str(tmp_path / "c"), 2 * READ_BYTES + 21)
    (tmp_path / "b").write_bytes(b"another")
    assert (FileCheck(tmp_path, entries).result(60) or "").startswith("b is not what was committed")
    (tmp_path / "b").unlink()
    assert (FileCheck(tmp_path, entries).result(60) or "").startswith("b cannot be read")
    assert FileCheck(tmp_path, []).result(60) == ""


@pytest.mark.slow
def test_the_check_can_be_stopped(tmp_path: Path) -> None:
    entries = [written(tmp_path, "a", 8 * READ_BYTES)] * 50
    before = set(threading.enumerate())
    check = FileCheck(tmp_path, entries)
    [thread] = set(threading.enumerate()) - before
    assert check.result(0.05) is None
    check.stop()
    thread.join(60)
    assert not thread.is_alive() and check.progress()[1] < 50 * 8 * READ_BYTES
