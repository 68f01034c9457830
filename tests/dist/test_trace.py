"""The heartbeat of a rank, as its agent reads it at any moment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl.messaging.trace import Activity, Trace, read_trace
from hpcrl.system.stacks import new_page

WRITER = """
import sys
from hpcrl.messaging.trace import Trace
trace = Trace(int(sys.argv[1]))
print("up", flush=True)
while True:
    trace.enter("generate", 7)
    trace.report_progress()
    trace._beat()
"""


def test_the_trace_shows_what_a_rank_does_and_since_when() -> None:
    page = new_page()
    assert read_trace(page) is None, "the rank has not come up"
    began = time.monotonic()
    trace = Trace(page)
    trace.enter("generate", 7)
    found = read_trace(page)
    assert found is not None and (found.seq, found.name, trace.doing) == (7, "generate", "generate #7")
    assert began <= found.beat <= found.since <= time.monotonic()
    trace.report_progress()
    again = read_trace(page)
    assert again is not None and again.since > found.since and again.beat == found.beat
    trace.enter("é" * 60)  # cut at its 64 bytes, in the middle of a letter
    found = read_trace(page)
    assert found is not None and found.seq == 0 and found.name == "é" * 32
    trace.enter("leave")
    assert (read_trace(page) or found).name == "leave", "nothing of the longer name before is left"
    os.close(page)
    trace.enter("more")
    last = trace.read()
    assert last is not None and last.name == "more", "the rank's side needs no open file"


def test_a_rank_without_an_agent_writes_no_trace_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = Trace.of_process({})
    trace.enter("generate", 7)
    found = trace.read()
    assert found is not None and found.seq == 7 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_trace_is_never_read_half_written() -> None:
    # Half-written or cleared numbers would look as old as the host to another process.
    page, began = new_page(), time.monotonic()
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(page)], stdout=subprocess.PIPE, pass_fds=[page])
    try:
        assert writer.stdout is not None and writer.stdout.readline() == b"up\n"
        seen: list[Activity] = []
        until = time.monotonic() + 1
        while time.monotonic() < until:
            found = read_trace(page)
            assert found is not None
            seen.append(found)
    finally:
        writer.kill()
        writer.wait()
    oldest = min(min(found.since, found.beat) for found in seen)
    newest = max(max(found.since, found.beat) for found in seen)
    assert began <= oldest and newest <= time.monotonic(), f"{len(seen)} readings"
