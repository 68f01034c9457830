"""The heartbeat of a rank, as its agent reads it at any moment."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from hpcrl.control.trace import Activity, Trace, read_trace

WRITER = """
import sys
from pathlib import Path
from hpcrl.control.trace import Trace
trace = Trace(Path(sys.argv[1]))
print("up", flush=True)
while True:
    trace.enter("generate", 7)
    trace.go_on()
    trace._beat()
"""


def test_it_says_what_the_rank_does_and_for_how_long(tmp_path: Path) -> None:
    path = tmp_path / "world" / "trace_3"
    assert read_trace(path) is None
    trace = Trace(path)
    trace.enter("generate", 7)
    time.sleep(0.05)
    found = read_trace(path)
    assert found is not None and (found.seq, found.name, trace.doing) == (7, "generate", "generate #7")
    assert found.age_s >= 0.05 and found.beat_age_s < 30
    trace.go_on()
    began = time.monotonic()
    trace.enter("é" * 60)  # cut at its 64 bytes, in the middle of a letter
    found = read_trace(path)
    assert found is not None and found.age_s <= time.monotonic() - began and found.seq == 0 and found.name == "é" * 32
    trace.enter("leave")
    assert (read_trace(path) or found).name == "leave", "nothing of the longer name before is left"


def test_a_rank_that_beats_never_looks_silent(tmp_path: Path) -> None:
    # Numbers that another process can see half written, or cleared before they are written, look as old as the host.
    path = tmp_path / "trace_0"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == b"up\n"
        seen: list[Activity] = []
        until = time.monotonic() + 1
        while time.monotonic() < until:
            found = read_trace(path)
            assert found is not None
            seen.append(found)
    finally:
        writer.kill()
        writer.wait()
    oldest = max(max(found.age_s, found.beat_age_s) for found in seen)
    assert oldest < 30 and min(found.age_s for found in seen) > -1, f"{len(seen)} readings"
