"""Section `timeline`: merging by numbers worked out by hand, budgets of hundreds of ranks, damage, hostile text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from hpcrl.report import timeline
from hpcrl.report.page import page
from hpcrl.report.run_files import RunFiles
from hpcrl.report.timeline import UNITS, coded_counts, coded_pieces, section, step_data
from hpcrl.rollout.types import make_sample_id
from hpcrl.timeline.step_file import ChunkRow, SampleRow, StepTimeline, encode, path_of
from hpcrl.timeline.waiting import LanePiece
from tests.report.test_page import HOSTILE, blocks, make_run
from tests.timeline.steps import large_step, make_step
from tests.timeline.test_waiting import ROWS


def write(run: RunFiles, *steps: StepTimeline) -> RunFiles:
    (run.path / "timeline").mkdir(exist_ok=True)
    for step in steps:
        path_of(run.path, step.header.step).write_bytes(encode(step))
    return run


def test_short_pieces_are_merged_under_what_most_of_their_time_was() -> None:
    names = ["a", "b", "c"]
    pieces = [(0, 400, "a"), (400, 430, "b"), (430, 500, "c"), (500, 520, "b"), (520, 530, "a"), (530, 1000, "b")]
    assert coded_pieces(pieces, 1000, 1000, names) == [
        8000,
        0,
        1,
        600,
        1,
        1,
        1400,
        2,
        1,
        400,
        1,
        1,
        200,
        0,
        1,
        9400,
        1,
        1,
    ]
    # parts of 100: 430 to 500 is the most of 400 to 500; 500 to 530 is 30 long, and opens a part of its own
    assert coded_pieces(pieces, 1000, 10, names) == [8000, 0, 1, 2000, 2, 2, 600, 1, 2, 9400, 1, 1]
    # parts of 250: all of them are less than a quarter of two parts, but more than a quarter of one
    assert coded_pieces(pieces, 1000, 4, names) == [8000, 0, 1, 2600, 2, 4, 9400, 1, 1]
    # parts of 1000 / 1.9: less than a quarter of a part belongs to the piece before
    gap = [(0, 530, "a"), (530, 560, "b"), (560, 1090, "a")]
    assert coded_pieces(gap, 1090, 4, names) == [
        round(560 / 1090 * UNITS),
        0,
        1,
        UNITS - round(560 / 1090 * UNITS),
        0,
        1,
    ]


def test_pieces_cover_the_step_whatever_is_merged() -> None:
    rng, names = random.Random(0), ["a", "b", "c"]
    for _ in range(100):
        ends = sorted(rng.sample(range(1, 5000), rng.randrange(1, 200)))
        pieces: list[LanePiece] = []
        for end in ends:
            pieces.append((pieces[-1][1] if pieces else 0, end, rng.choice(names)))
        coded = coded_pieces(pieces, ends[-1], rng.choice((5, 50, 500)), names)
        assert sum(coded[::3]) == UNITS and all(duration > 0 for duration in coded[::3])


def test_counts_of_requests_are_thinned() -> None:
    counts = ((0, 8, 2), (40, 8, 2), (60, 7, 0), (160, 6, 0), (-5, 9, 1), (180, 5, 0))
    chunks = [ChunkRow(2, 1, start, 20, 64, running, queued) for start, running, queued in counts]
    assert coded_counts(chunks, 200, 4) == [0, 9, 1, 6000, 7, 0, 16000, 6, 0]


def test_a_step_of_300_ranks_stays_below_its_budget(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write(run, *(large_step(step=step) for step in (1, 2, 3)))
    data: Any = section(run).data  # type: ignore[union-attr]
    assert len(data["steps"]) == 3
    for step in data["steps"]:
        assert len(step["lanes"]) == 299 and len(step["samples"]) <= timeline.MAX_DRAWN
        assert len(json.dumps(step["lanes"], separators=(",", ":"))) < 1.1 * timeline.STEP_BYTES
        assert step["merged_below_s"] < 1.0  # of 300 s
        trainer = step["roles"][0]
        assert (trainer["roles"], trainer["ranks"]) == ("trainer", 128)
        assert trainer["waiting"][0][0] == "generation" and 0.55 < trainer["waiting"][0][1] < 0.6
    assert len(page([run])) < 3_000_000


def test_the_page_has_a_spread_of_the_steps_within_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "".join(
        json.dumps({"step": step, "time/step_total": 9.0 if step == 77 else 1.0}) + "\n" for step in range(101)
    )
    run = write(make_run(tmp_path / "run", metrics__jsonl=rows), *(make_step(*ROWS, step=step) for step in range(101)))
    data: Any = section(run).data  # type: ignore[union-attr]
    shown = [step["step"] for step in data["steps"]]
    assert len(shown) == timeline.MAX_STEPS and {0, 25, 50, 75, 77, 100} <= {*shown} and data["slowest"] == 77
    assert data["recorded"] == 101
    monkeypatch.setattr(timeline, "PAGE_BYTES", 2 * len(json.dumps(data["steps"][0])))
    few: Any = section(run).data  # type: ignore[union-attr]
    assert {step["step"] for step in few["steps"]} <= {0, 77, 100} and len(few["steps"]) >= 2
    monkeypatch.setattr(timeline, "PAGE_BYTES", 1)
    newest: Any = section(run).data  # type: ignore[union-attr]
    assert [step["step"] for step in newest["steps"]] == [100]


def test_a_damaged_file_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    run = write(make_run(tmp_path / "run"), *(make_step(*ROWS, step=step) for step in (1, 2)))
    path_of(run.path, 2).write_bytes(b"no")
    data: Any = section(run).data  # type: ignore[union-attr]
    assert [step["step"] for step in data["steps"]] == [1]
    assert len(run.problems) == 1 and "step_000002.jsonl, line 1: not the header of a timeline" in run.problems[0]
    path_of(run.path, 1).write_bytes(b"")
    assert section(run) is None
    assert section(make_run(tmp_path / "other")) is None


def test_a_file_that_leads_out_of_the_served_folder_is_not_read(tmp_path: Path) -> None:
    secret = write(make_run(tmp_path / "secret"), make_step(*ROWS, step=2))
    run = write(make_run(tmp_path / "runs" / "run"), make_step(*ROWS, step=1))
    path_of(run.path, 2).symlink_to(path_of(secret.path, 2))
    data: Any = section(RunFiles(run.path, inside=tmp_path / "runs")).data  # type: ignore[union-attr]
    assert [step["step"] for step in data["steps"]] == [1] and data["recorded"] == 1


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    run = write(make_run(tmp_path / "run"), make_step(*ROWS, step=1))
    for length in (100, 2000):
        write(run, make_step(*ROWS, step=1, length=length))
        data: Any = section(run).data  # type: ignore[union-attr]
        assert data["steps"][0]["seconds"] == length / 1e6


def test_samples_have_their_names_and_hostile_text_stays_data(tmp_path: Path) -> None:
    sample = make_sample_id(5, 2, 3)
    rows = SampleRow(sample, 5, HOSTILE, 2, HOSTILE, 1, 30, 1, -20, -10, 20, 45, 60), *ROWS
    roles = (("controller",), (HOSTILE,), ("generator",), ("generator",), ("reward",))
    run = write(make_run(tmp_path / "run"), make_step(*rows, roles=roles))
    text = page([run], [timeline])
    step = blocks(text)["data-0-timeline"]["steps"][0]
    assert step["samples"] == [["5.2.3", HOSTILE, 2, HOSTILE, 30, 1, 1, -20, -10, 20, 45, 60]]
    assert step["fates"] == [["other", 1]] and step["roles"][0]["roles"] == HOSTILE
    assert "alert(1)</script>" not in text and "<img src=x" not in text


def test_rank_0_has_a_lane_only_if_it_has_other_roles() -> None:
    alone = step_data(make_step(*ROWS))
    assert [lane[0] for lane in alone["lanes"]] == [1, 2, 3, 4]
    shared = step_data(make_step(ChunkRow(0, 1, 0, 50, 1, 1, 0), roles=(("controller", "trainer", "generator"),)))
    assert [lane[0] for lane in shared["lanes"]] == [0] and shared["lanes"][0][3][0] == UNITS // 2
