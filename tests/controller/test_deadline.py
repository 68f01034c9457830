"""When the controller begins no further step."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from hpcrl.controller.deadline import ASK_S, SPARE_S, Deadline


def at(now: float, end: float | None) -> Deadline:
    return Deadline({"HPCRL_JOB_END": "" if end is None else str(end)}, clock=lambda: now)


def test_without_a_job_there_is_no_deadline() -> None:
    deadline = Deadline({}, clock=lambda: 1e9)
    deadline.record(1e6)
    assert deadline.left_s() == math.inf
    assert not deadline.is_near(1e6)
    assert at(1e9, 0).left_s() == math.inf  # a job without a limit


def test_a_step_begins_only_if_the_longest_recent_step_and_a_save_fit() -> None:
    deadline = at(1000.0, 1100.0)
    for seconds in (10.0, 40.0, 20.0):
        deadline.record(seconds)
    assert deadline.left_s() == 100.0
    assert deadline.needed_s(30.0) == pytest.approx(1.2 * (40 + 30) + SPARE_S)
    assert not deadline.is_near(30.0)  # 89 s of 100
    assert deadline.is_near(40.0)  # 101 s


def test_a_long_step_stops_counting_after_further_steps() -> None:
    deadline = at(0.0, 100.0)
    for seconds in (90.0, 1.0, 1.0, 1.0, 1.0):
        deadline.record(seconds)
    assert deadline.is_near(0.0)
    deadline.record(1.0)
    assert not deadline.is_near(0.0)


def test_signal_lead_is_judged_by_measured_durations() -> None:
    deadline = Deadline({"SLURM_JOB_ID": "7"}, clock=lambda: 0.0)
    assert deadline.notice(10.0, 300) == ""  # no step yet
    deadline.record(100.0)
    assert deadline.notice(0.0, 300) == ""  # no save yet
    assert deadline.notice(20.0, 300) == (
        "a step takes up to 100.0 s and a save 20.0 s: with 300 s of notice (cluster.signal_lead_s) no step is lost"
    )
    assert "100 s of notice (cluster.signal_lead_s) may be too short" in deadline.notice(20.0, 100)
    assert at(0.0, 1000.0).notice(20.0, 100) == ""  # not in a job


@pytest.mark.slow
def test_an_unresponsive_slurm_delays_training_only_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol, now = tmp_path / "scontrol", 0.0
    scontrol.write_text("#!/bin/sh\nexec sleep 60\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    deadline = Deadline({"SLURM_JOB_ID": "7", "HPCRL_JOB_END": "1000"}, clock=lambda: now)
    now = 100.0
    start = time.perf_counter()
    assert deadline.left_s() == 900, "the end that was known"
    assert ASK_S <= time.perf_counter() - start < ASK_S + 20
    start = time.perf_counter()
    assert deadline.left_s() == 900 and time.perf_counter() - start < ASK_S, "not asked again at once"
    scontrol.write_text("#!/bin/sh\necho JobId=7 JobState=RUNNING EndTime=2000\n")
    now = 200.0
    assert deadline.left_s() == 1800, "asked again, a minute later"
