"""The trace against the documented fields of the format, and the command that writes it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from hpcrl.commands import timeline as command
from hpcrl.timeline.chrome_trace import chrome_trace
from hpcrl.timeline.step_file import SampleRow, encode, path_of
from tests.timeline.steps import make_step
from tests.timeline.test_waiting import ROWS

SAMPLES = (
    SampleRow(2**60, 5, "</script>", 2, "trained", 1, 30, 1, -20, -10, 20, 45, 60),
    SampleRow(2**60 + 1, 5, "maths", 2, "trained", 0, 30, 1, 0, 0, 10, 43, 60),
    SampleRow(2**60 + 2, 5, "maths", -1, "dropped", None, 0, 0, None, None, None, None, 5),
)
STEP = make_step(*ROWS, *SAMPLES)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = path_of(tmp_path / "run", 7)
    path.parent.mkdir(parents=True)
    path.write_bytes(encode(STEP))
    return tmp_path / "run"


def test_every_event_has_the_fields_that_the_format_requires() -> None:
    trace = json.loads(json.dumps(chrome_trace(STEP)))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "C", "M"}
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["ts"], int) and event["ts"] >= 0
        match event["ph"]:
            case "X":
                assert isinstance(event["dur"], int) and event["dur"] >= 0 and isinstance(event["cat"], str)
            case "C":
                assert all(isinstance(value, int) for value in event["args"].values())
            case "M":
                assert event["name"] in ("process_name", "process_sort_index", "thread_name")
    lanes = {(event["pid"], event["tid"]) for event in events}
    for name in ("process_name", "thread_name"):
        named = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M" and event["name"] == name}
        assert named == lanes
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed) and timed[0] == 0


def test_events_of_a_lane_do_not_overlap() -> None:
    by_lane: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in chrome_trace(STEP)["traceEvents"]:
        if event["ph"] == "X":
            by_lane.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_lane) == 1 + 3 + 2 + 2  # waits, commands of three ranks, two scores at once, two samples at once
    for spans in by_lane.values():
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_times_are_microseconds_from_the_first_event() -> None:
    events = chrome_trace(STEP)["traceEvents"]
    (training,) = (event for event in events if event["name"] == "TrainStep" and event["ph"] == "X")
    assert (training["ts"], training["dur"], training["pid"], training["args"]) == (70, 20, 1, {"number": 2})
    parts = {e["name"]: (e["ts"], e["dur"]) for e in events if e.get("args", {}).get("sample") == str(2**60)}
    assert parts == {"until generated": (0, 30), "until scored": (30, 25), "until trained": (55, 15)}


def test_the_command_shows_shares_and_writes_a_new_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "trace.json"
    assert command.main([str(run), "--step", "7", "--chrome-trace", str(target)]) == 0
    shown = capsys.readouterr().out
    assert "trainer: 1 rank\n   20.0%  training\n" in shown and "   40.0%  waited for generation\n" in shown
    assert "generator: 2 ranks" in shown and "   15.0%  waited for slower replicas\n" in shown
    assert "3 samples: 2 trained, 1 dropped\n  generation: median 2e-05 s, from 1e-05 to 3e-05 s" in shown
    assert "lag: mean 0.50, at most 1 weight versions" in shown
    assert len(json.loads(target.read_text())["traceEvents"]) > len(ROWS)
    before = target.read_bytes()
    assert command.main([str(run), "--chrome-trace", str(target)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err and target.read_bytes() == before


def test_bad_input_is_one_line_with_the_way_out(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for words, text in (
        ([str(run), "--step", "8"], "--step 8: "),
        ([str(tmp_path / "absent")], "absent is not a run folder"),
        ([str(tmp_path / "empty")], "has no timelines"),
        ([str(run), "--step", "x"], "argument --step: invalid int value"),
        ([], "RUN"),
    ):
        assert command.main(words) == 2
        told = capsys.readouterr().err
        assert text in told and told.count("\n") == 1
    path_of(run, 9).write_bytes(b"\0" * 100)
    assert command.main([str(run)]) == 2
    assert "step_000009.jsonl, line 1: not the header of a timeline" in capsys.readouterr().err
