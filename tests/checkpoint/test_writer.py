"""The process that writes a rank's files, against a full disk, kills and the death of its rank."""

from __future__ import annotations

import hashlib
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hpcrl.checkpoint.writer import CHUNK_BYTES, Pieces, SharedFile, Writer, Written
from tests.checkpoint.writing import write_files
from tests.children import children

DYING_RANK = """
import os, signal, sys
from pathlib import Path
from hpcrl.checkpoint.writer import Writer
writer = Writer()
writer.start(Path(sys.argv[1]), {"file": b"x"})
writer.result(wait_s=None)
writer.start(Path(sys.argv[1]), {"other": b"x" * 10})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def writer() -> Iterator[Writer]:
    made = Writer()
    yield made
    made.close()


def process_of(writer: Writer) -> psutil.Process:
    """The process, once it runs hpcrl's code, which blocks signals."""
    [process] = children("hpcrl.checkpoint.writer")
    return process


def shared(content: bytes) -> SharedFile:
    file = SharedFile(len(content))
    file.buffer[:] = content
    return file


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_pieces_are_written_in_place(tmp_path: Path, writer: Writer) -> None:
    """A thread writes them: no process is started, and the files are the same as with copies."""
    parts = [os.urandom(size) for size in (3, CHUNK_BYTES + 7, 0, 11)]
    whole = b"".join(parts)
    writer.start(tmp_path, {"small": b"abc", "big": Pieces(len(whole), map(memoryview, parts))})
    written = writer.result(wait_s=None)
    assert written is not None and not writer.busy
    assert [(entry.path, entry.size) for entry in written.entries] == [("small", 3), ("big", len(whole))]
    assert written.entries[1].sha256 == hashlib.sha256(whole).hexdigest()
    assert (tmp_path / "big").read_bytes() == whole
    assert writer.progress() == (str(tmp_path), 3 + len(whole))
    assert not children("hpcrl.checkpoint.writer")

    def broken() -> Iterator[memoryview]:
        yield memoryview(b"x")
        raise RuntimeError("a defect")

    writer.start(tmp_path, {"broken": Pieces(2, broken())})
    with pytest.raises(OSError, match=r"the thread that writes .*broken ended"):
        writer.result(wait_s=None)
    writer.busy = False
    with pytest.raises(OSError, match="big cannot be written: File exists"):
        writer.start(tmp_path, {"big": Pieces(1, [memoryview(b"x")])})
        writer.result(wait_s=None)


@pytest.mark.slow
def test_file_contents_are_written_unchanged(tmp_path: Path, writer: Writer) -> None:
    big = os.urandom(CHUNK_BYTES + 7)
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        image = shared(big)
        writer.start(folder, {"small": b"abc", "big": image, "empty": b""})
        with pytest.raises(AssertionError, match="still being written"):
            writer.start(folder, {"small": b"abc"})
        entries, seconds = writer.result(wait_s=None) or Written([], 0.0)
        image.buffer[:3] = b"new"  # may be used again from here on
        assert (folder / "big").read_bytes() == big and (folder / "small").read_bytes() == b"abc"
        assert [(e.path, e.size) for e in entries] == [("small", 3), ("big", len(big)), ("empty", 0)]
        assert [e.sha256 for e in entries[:2]] == [hashlib.sha256(content).hexdigest() for content in (b"abc", big)]
        assert 0 < seconds < 60
        (tmp_path / "here").mkdir(exist_ok=True)
        if number == 1:
            assert entries[0] == write_files(tmp_path / "here", {"small": b"abc"})[0], "the same without a process"


def test_a_stopped_writer_does_not_block_the_rank(tmp_path: Path, writer: Writer) -> None:
    """Here the writer is stopped with SIGSTOP."""
    writer.start(tmp_path, {"first": b"x"})
    writer.result(wait_s=None)
    process_of(writer).send_signal(signal.SIGSTOP)
    start = time.perf_counter()
    writer.start(tmp_path, {"second": os.urandom(8 << 20)})
    assert writer.result(wait_s=0) is None and not (tmp_path / "second").exists()
    assert time.perf_counter() - start < 20, "it would wait until the writer continues"
    process_of(writer).send_signal(signal.SIGCONT)
    assert writer.result(wait_s=None) is not None and (tmp_path / "second").stat().st_size == 8 << 20


@pytest.mark.slow
def test_the_writer_reports_how_much_is_on_the_disk(tmp_path: Path, writer: Writer) -> None:
    writer.start(tmp_path, {"first": b"x"})
    writer.result(wait_s=None)
    assert writer.progress()[1] == 1
    process_of(writer).send_signal(signal.SIGSTOP)
    image = SharedFile(3 * CHUNK_BYTES)
    writer.start(tmp_path, {"big": image, "small": b"abc"})
    start = time.perf_counter()
    assert writer.result(wait_s=0.3) is None and 0.3 <= time.perf_counter() - start < 5
    assert writer.progress() == (str(tmp_path / "big"), 0)
    process_of(writer).send_signal(signal.SIGCONT)
    seen = set()
    while writer.result(wait_s=0.001) is None:
        seen.add(writer.progress()[1])
    assert seen & {CHUNK_BYTES, 2 * CHUNK_BYTES}, "told before the file's end"
    assert writer.progress()[1] == 3 * CHUNK_BYTES + 3


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, writer: Writer) -> None:
    writer.start(tmp_path, {"first": b"x"})
    writer.result(wait_s=None)
    process_of(writer).rlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # as on a disk that is full
    writer.start(tmp_path, {"fits": b"x", "does_not": bytes(2 << 20)})
    with pytest.raises(OSError, match=rf"{tmp_path}/does_not cannot be written: File too large"):
        writer.result(wait_s=None)


def test_a_killed_writer_is_named_with_its_file(tmp_path: Path, writer: Writer) -> None:
    writer.start(tmp_path, {"first": b"x"})
    writer.result(wait_s=None)
    process = process_of(writer)
    process.send_signal(signal.SIGSTOP)
    writer.start(tmp_path, {"second": b"x"})
    process.kill()
    with pytest.raises(OSError, match=rf"writes {tmp_path}/second was killed by SIGKILL \(pid {process.pid}\)"):
        writer.result(wait_s=None)


def test_a_writer_that_died_between_saves_is_noticed_at_the_next_start(tmp_path: Path, writer: Writer) -> None:
    writer.start(tmp_path, {"first": b"x"})
    writer.result(wait_s=None)
    process = process_of(writer)
    process.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    with pytest.raises(OSError, match="was killed by SIGKILL"):
        writer.start(tmp_path, {"second": b"x"})


def test_signals_to_the_whole_job_do_not_end_the_writer(tmp_path: Path, writer: Writer) -> None:
    writer.start(tmp_path, {"first": b"x"})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        process_of(writer).send_signal(number)  # the first while it starts
    assert writer.result(wait_s=None) is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        process_of(writer).send_signal(number)
    writer.start(tmp_path, {"second": b"x"})
    assert writer.result(wait_s=None) is not None


@pytest.mark.slow
def test_the_writer_dies_with_its_rank(tmp_path: Path) -> None:
    rank = subprocess.Popen([sys.executable, "-c", DYING_RANK, str(tmp_path)])
    started = psutil.Process(rank.pid)
    children: list[psutil.Process] = []
    while not children:
        children = started.children()
        time.sleep(0.005)
    assert rank.wait(30) == -signal.SIGKILL
    assert not psutil.wait_procs(children, 20)[1], "it has outlived its rank"


def test_the_writer_says_nothing_when_its_rank_ends_without_reading_answers(
    tmp_path: Path, writer: Writer, capfd: pytest.CaptureFixture[str]
) -> None:
    """The log of a rank that is lost ends with why it ended, not with a traceback of its writer."""
    writer.start(tmp_path, {"first": b"x"})
    process, rank_side = writer._process, writer._socket
    assert process is not None and rank_side is not None and select.select([rank_side], [], [], 60)[0]
    rank_side.close()
    assert process.wait(60) == 0 and capfd.readouterr().err == ""
