"""Messages: their form in a file and for a user, and their sources."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hpcrl.system import log

AT = datetime(2026, 11, 28, 19, 0, 1, 123_000, UTC).timestamp()
OURS, OTHERS = logging.getLogger("hpcrl.controller.main"), logging.getLogger("library.engine")


@pytest.fixture(autouse=True)
def one_host_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node01")
    monkeypatch.delenv(log.IN_JOB, raising=False)
    monkeypatch.setattr(time, "time", lambda: AT)  # until Python 3.12
    monkeypatch.setattr(time, "time_ns", lambda: round(AT * 1e3) * 10**6)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[], str]:
    """The content of the log file of rank 3, which this fixture starts."""
    path = tmp_path / "logs" / "rank_0003.log"
    log.start("rank 3", file=path)
    return path.read_text


def test_messages_in_a_file_have_a_header(written: Callable[[], str]) -> None:
    OURS.warning("step %d: not finite: %s\nand more", 7, "loss")
    OURS.info("resumed")
    OTHERS.error("no weight")
    OTHERS.info("a library's progress")
    OURS.log(25, "between")
    try:
        raise ValueError("bad\nrow")
    except ValueError:
        OURS.error("failed", exc_info=True)
    lines = written().splitlines()
    header = "2026-11-28T19:00:01.123+00:00 node01 rank 3"
    assert lines[:6] == [
        f"{header} WARNING step 7: not finite: loss",
        "  and more",
        f"{header} INFO resumed",
        f"{header} ERROR library.engine: no weight",
        f"{header} INFO between",
        f"{header} ERROR failed",
    ]
    assert lines[6] == "  Traceback (most recent call last):" and lines[-2:] == ["  ValueError: bad", "  row"]
    found = log.HEADER.match(lines[0])
    assert found is not None and found.groupdict() == {
        "time": "2026-11-28T19:00:01.123+00:00",
        "host": "node01",
        "who": "rank 3",
        "level": "WARNING",
    }
    assert log.message_of(lines[0]) == "step 7: not finite: loss" and log.message_of("hpcrl: text") == "text"


def test_a_user_gets_only_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.start("rank 0", file=tmp_path / "log", console="stdout")
    OURS.info("step 1/6  reward 0.5", extra=log.BARE)
    OURS.warning("a loss")
    OURS.info("pid 7", extra=log.UNSHOWN)
    OTHERS.warning("a library's")
    assert capsys.readouterr() == ("step 1/6  reward 0.5\nhpcrl: a loss\n", "")
    texts = [log.message_of(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert texts == ["step 1/6  reward 0.5", "a loss", "pid 7", "library.engine: a library's"]
    log.start("rank 2", console="stderr")
    OURS.error("cannot join")
    assert capsys.readouterr() == ("", "hpcrl rank 2: cannot join\n")


def test_a_jobs_console_looks_like_its_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(log.IN_JOB, "0")
    log.start("agent", console="stderr")
    OURS.warning("a loss")
    assert capsys.readouterr().err == "2026-11-28T19:00:01.123+00:00 node01 agent WARNING a loss\n"


def test_rank_0_leaves_printing_errors_to_its_agent(capfd: pytest.CaptureFixture[str]) -> None:
    """The agent prints one line at the end of the run; standard error is the log."""
    log.start("rank 0", file=log.STDERR, console="stdout")
    OURS.error("the run ends")
    OURS.warning("goes on")
    out, err = capfd.readouterr()
    assert out == "hpcrl: goes on\n" and err.count("node01 rank 0 ") == 2


def test_other_output_of_libraries_gets_a_header(capfd: pytest.CaptureFixture[str]) -> None:
    log.start("rank 3", file=log.STDERR)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    thread = threading.Thread(target=lambda: 1 / 0, name="watch")
    thread.start()
    thread.join()
    library = logging.getLogger("a_library")
    own = logging.StreamHandler(sys.stderr)
    own.setFormatter(logging.Formatter("[%(message)s]"))
    library.addHandler(own)
    library.propagate = False
    library.warning("before")
    log.adopt_libraries()
    library.warning("after")
    library.removeHandler(own)
    library.propagate = True
    lines = capfd.readouterr().err.splitlines()
    assert "rank 3 WARNING py.warnings: " in lines[0] and "DeprecationWarning: old" in lines[0]
    assert any("rank 3 ERROR thread watch ended by ZeroDivisionError" in line for line in lines)
    assert lines[-2] == "[before]" and lines[-1].endswith("rank 3 WARNING a_library: after")


def test_library_messages_are_not_printed_by_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    log.start("", console="stderr")
    OTHERS.warning("a library's")
    OURS.info("ours")
    assert capsys.readouterr().err == "hpcrl: ours\n", "pytest takes the other; Python's default would show it"
    assert not [handler for handler in logging.getLogger().handlers if isinstance(handler, log._Lines)]


def test_a_full_disk_or_a_removed_folder_loses_only_the_message(tmp_path: Path) -> None:
    log.start("agent", file=Path("/dev/full"))
    OURS.warning("lost")
    (tmp_path / "file").touch()
    log.start("agent", file=tmp_path / "file" / "agent_0000.log")
    OURS.warning("lost, too")
    log.start("agent", file=tmp_path / "agent_0000.log")
    OURS.warning("kept")
    text = (tmp_path / "agent_0000.log").read_text()
    assert text.endswith("kept\n") and "lost" not in text


CRASH = """
import logging, sys
from hpcrl.system import log
log.start("rank 1", file=log.STDERR)
assert "torch" not in sys.modules and "numpy" not in sys.modules
logging.getLogger("hpcrl").info("up")
raise ValueError("bad row")
"""


def test_the_time_of_a_crash_is_logged() -> None:
    done = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and lines[0].endswith(" rank 1 INFO up")
    assert lines[1].endswith(" rank 1 CRITICAL ended by ValueError") and lines[-1] == "  ValueError: bad row"
