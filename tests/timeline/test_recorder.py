"""The recorder: conversion of clocks, lives of samples, limits; its files: damaged, pruned, written by nobody else."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from hpcrl.timeline import recorder as module
from hpcrl.timeline.host_clocks import HostClocks
from hpcrl.timeline.recorder import RecordedStep, Recorder
from hpcrl.timeline.step_file import ChunkRow, CommandRow, WaitRow, encode, path_of, prune, read_step, recorded_steps
from hpcrl.timeline.writer import TimelineWriter
from tests.timeline.steps import make_step
from tests.timeline.test_waiting import ROWS

ROLES = (("controller",), ("trainer",), ("generator",), ("reward",))


class Kept:
    """Keeps the steps instead of writing them."""

    def __init__(self) -> None:
        self.steps: list[RecordedStep] = []

    def put(self, step: RecordedStep) -> None:
        self.steps.append(step)

    def close(self, within_s: float) -> None: ...


class Clock:
    """The time of rank 0, set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now: float):
        self.now = now
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, 100.0)


def make_recorder(*hosts: str) -> tuple[Recorder, Kept]:
    kept = Kept()
    recorder = Recorder(ROLES, "node1", kept)
    for rank, host in enumerate(hosts):
        recorder.joined(rank, host)
    return recorder, kept


def test_offsets_lie_between_the_bounds_of_all_messages() -> None:
    """The other host's clock is 1000 s behind; messages need 1 to 4 ms."""
    clocks = HostClocks("node1")
    clocks.heard("node1", 5.0, 6.0, 7.0, 8.0)
    clocks.heard("node2", sent=2000.000, start=1000.002, end=1000.500, received=2000.504)
    clocks.heard("node2", sent=2001.000, start=1001.001, end=1001.100, received=2001.103)
    taken = clocks.take()
    assert taken["node1"].offset_s == 0.0 and taken["node1"].error_s == 0.0
    # at least max(999.998, 999.999), at most min(1000.004, 1000.003)
    assert taken["node2"].offset_s == pytest.approx(1000.001) and taken["node2"].error_s == pytest.approx(0.002)
    clocks.heard("node2", sent=2002.000, start=1002.0005, end=1002.1, received=2002.2)
    assert clocks.take()["node2"].offset_s == pytest.approx((999.9995 + 1000.003) / 2)  # with the previous step's bound
    clocks.heard("node2", sent=2100.0, start=1099.0, end=1099.1, received=2100.101)  # the clock has jumped
    assert clocks.take()["node2"].offset_s == pytest.approx(1001.0005)
    assert "node3" not in clocks.take()


def test_the_commands_of_a_step_are_on_the_clock_of_rank_0(clock: Clock) -> None:
    recorder, kept = make_recorder("node1", "node2", "node1")
    recorder.begin(3)
    clock.now = 101.0
    recorder.sent(1, 1, "TrainStep", 101.0)
    recorder.sent(2, 1, "Admit", 101.0)
    recorder.sent(2, 2, "DecodeChunk", 101.0)
    clock.now = 104.002
    recorder.executed(1, [(1, 11.001, 3.0)])  # 90 s behind
    recorder.executed(2, [(1, 101.5, 0.25), (2, 101.75, 2.0)], (2, 64, 8, 3))
    recorder.waited("TrainStep", 101.0)
    clock.now = 110.0
    recorder.end()
    recorder.end()
    (step,) = (recorded.converted() for recorded in kept.steps)
    assert step.header.step == 3 and step.header.seconds == 10.0 and step.header.complete
    assert step.header.clocks["node2"].error_s == pytest.approx(0.001, abs=1e-6)
    assert step.commands == [
        CommandRow(1, "TrainStep", 1, 1_001_000, 3_000_000),
        CommandRow(2, "Admit", 1, 1_500_000, 250_000),
    ]
    assert step.chunks == [ChunkRow(2, 2, 1_750_000, 2_000_000, 64, 8, 3)]
    assert step.waits == [WaitRow("TrainStep", 1_000_000, 3_002_000)]


def test_a_sample_lives_from_its_draw_to_its_training_even_over_steps(clock: Clock) -> None:
    recorder, kept = make_recorder("node1", "node1", "node1", "node1")
    recorder.restored([(77, "code")], [(999, 77, 2, 9)])
    recorder.begin(1)
    recorder.drawn([(5, "maths"), (6, "maths")])
    clock.now = 101.0
    recorder.admitted(2, [(50, 5), (51, 5), (60, 6), (61, 6)])
    recorder.decoded(2, 102.0, [(50, 7), (60, 3)])
    recorder.worked("turn", 3, 50, 102.1, 102.5, final=False)
    recorder.decoded(2, 104.0, [(50, 12)])
    recorder.worked("reward", 3, 50, 104.5, 105.0, final=True)
    recorder.worked("reward", 3, 60, 102.5, 101.5, final=True)  # another clock: before the end of generation
    clock.now = 106.0
    recorder.closed([60], "dropped")
    recorder.closed([61], "baseline")
    recorder.prompt_ended(6, "filtered")
    recorder.begin(2)
    clock.now = 108.0
    recorder.closed([50], "trained", lag=1)
    recorder.closed([999], "trained", lag=0)
    recorder.closed([998], "dropped")  # unknown
    recorder.lost_replica(2)
    recorder.close(0.0)
    first, second = (recorded.converted() for recorded in kept.steps)
    assert [(s.sample, s.fate) for s in first.samples] == [(60, "filtered"), (61, "baseline")]
    assert first.header.open_samples == 3 and first.header.complete
    dropped = first.samples[0]
    assert (dropped.drawn, dropped.start, dropped.end, dropped.scored) == (0, 1_000_000, 2_000_000, 2_000_000)
    trained, restored, lost = second.samples
    assert (trained.sample, trained.prompt, trained.domain, trained.replica) == (50, 5, "maths", 2)
    assert (trained.fate, trained.lag, trained.tokens, trained.turns) == ("trained", 1, 12, 2)
    times = trained.drawn, trained.start, trained.end, trained.scored, trained.done
    assert times == (-6_000_000, -5_000_000, -2_000_000, -1_000_000, 2_000_000)
    assert (restored.sample, restored.prompt, restored.domain, restored.tokens) == (999, 77, "code", 9)
    assert (restored.start, restored.end, restored.done) == (None, None, 2_000_000)
    assert (lost.sample, lost.fate, lost.end) == (51, "lost", None)
    assert not second.header.complete


def test_rows_beyond_the_limits_are_counted(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS_OF_RANK", 3)
    monkeypatch.setattr(module, "MAX_SAMPLES", 2)
    monkeypatch.setattr(module, "MAX_SENT", 4)
    recorder, kept = make_recorder("node1", "node1")
    recorder.begin(1)
    for number in range(1, 6):
        recorder.sent(1, number, "Ask", 100.0)
        recorder.drawn([(number, "maths")])
        recorder.admitted(1, [(number, number)])
        recorder.waited("Ask", 100.0)
    recorder.executed(1, [(number, 100.0, 0.0) for number in range(1, 6)])
    recorder.end()
    recorder.begin(2)
    recorder.executed(1, [(9, 100.0, 0.0)])
    recorder.end()
    first, second = (recorded.converted() for recorded in kept.steps)
    assert [row.name for row in first.commands] == ["?", "Ask", "Ask"]  # the oldest of five names was forgotten
    assert first.header.omitted == {1: 2, module.OF_WAITS: 2, module.OF_SAMPLES: 3}
    assert len(second.commands) == 1 and second.header.omitted == {}


def test_a_step_is_read_as_it_was_written_and_damaged_lines_are_left_out(tmp_path: Path) -> None:
    step, path = make_step(*ROWS), path_of(tmp_path, 7)
    path.parent.mkdir()
    path.write_bytes(encode(step))
    found = read_step(path)
    assert list(found.rows()) == list(step.rows()) and found.header == step.header and not found.damaged
    lines = path.read_bytes().split(b"\n")
    odd = [b"\xff\xfe", b"[" * 5000, b'["command",99,"Ask",1,0,0]', b'["wait","x",1]', b'{"a":1}', b'["chunk",2,1,']
    path.write_bytes(b"\n".join([*lines[:3], *odd]))
    found = read_step(path)
    assert len(list(found.rows())) == 2 and found.damaged == len(odd)
    for content, why in ((b"", "not the header"), (b"[1]\n", "not the header"), (b'{"format":1}', "not the header")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"step_000007.jsonl, line 1: {why}"):
            read_step(path)
    path.write_bytes(encode(step).replace(b'"format":1', b'"format":2', 1))
    with pytest.raises(ValueError, match="format 2, this version of hpcrl reads format 1"):
        read_step(path)


def test_the_newest_steps_and_a_regular_choice_of_earlier_ones_are_kept(tmp_path: Path) -> None:
    (tmp_path / "timeline").mkdir()
    for step in range(11):
        path_of(tmp_path, step).touch()
    (tmp_path / "timeline" / "notes.txt").touch()
    prune(tmp_path, 4)
    assert recorded_steps(tmp_path) == [0, 4, 7, 8, 9, 10]
    assert (tmp_path / "timeline" / "notes.txt").exists()
    assert recorded_steps(tmp_path / "absent") == []


def recorded(step: int) -> RecordedStep:
    return RecordedStep(step, 0.0, 0.0, ended=1.0)


def test_the_writer_never_blocks_and_reports_once_what_it_cannot_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    may_write = threading.Event()

    def fence() -> None:
        assert may_write.wait(60.0)

    writer = TimelineWriter(tmp_path, 50, fence)
    with caplog.at_level(logging.WARNING):
        began = time.monotonic()
        for step in range(1, 8):
            writer.put(recorded(step))
        assert time.monotonic() - began < 20, "does not wait for the writer"
        may_write.set()
        writer.close(10.0)
    written = recorded_steps(tmp_path)
    assert 2 <= len(written) <= 3 and written[0] == 1
    assert len(caplog.records) == 1 and "left out: earlier ones are still being written" in caplog.text


def test_a_superseded_attempt_writes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fence() -> None:
        raise RuntimeError("attempt 2 owns the run")

    writer = TimelineWriter(tmp_path, 50, fence)
    writer.put(recorded(1))
    writer.put(recorded(2))
    writer.close(10.0)
    assert recorded_steps(tmp_path) == [] and caplog.text.count("attempt 2 owns the run") == 1
