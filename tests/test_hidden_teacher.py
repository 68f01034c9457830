"""The bench of the hidden teacher on timelines worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.timeline.step_file import FORMAT, ChunkRow, CommandRow, RankHeader, StepHeader, StepTimeline, encode, path_of
from tests.bench.hidden_teacher import WARM_STEPS, figures


def write(run_dir: Path, step: int, began: float, chunks: list[tuple[int, int]], teach: tuple[int, int]) -> None:
    """A step of 10 s; spans are (start, duration) in seconds."""
    ranks = [RankHeader(rank, "node1", [role]) for rank, role in enumerate(("controller", "trainer", "generator"))]
    ranks.append(RankHeader(3, "node1", ["teacher"]))
    timeline = StepTimeline(StepHeader(FORMAT, step, began, 10.0, True, ranks, {}))
    timeline.chunks = [ChunkRow(2, n, int(1e6 * at), int(1e6 * of), 8, 1, 0) for n, (at, of) in enumerate(chunks)]
    timeline.commands = [CommandRow(3, "Teach", 1, int(1e6 * teach[0]), int(1e6 * teach[1]))]
    timeline.commands.append(CommandRow(1, "TrainStep", 1, 8_000_000, 1_000_000))
    path_of(run_dir, step).parent.mkdir(exist_ok=True)
    path_of(run_dir, step).write_bytes(encode(timeline))


def test_the_hidden_share_is_the_time_in_which_chunks_overlap_the_teachers_pass(tmp_path: Path) -> None:
    for step in range(1, WARM_STEPS + 1):  # left out, although all of the pass is hidden
        write(tmp_path, step, 10.0 * step, [(0, 10)], (2, 4))
    step = WARM_STEPS + 1
    write(tmp_path, step, 100.0, [(0, 3), (5, 2)], (2, 4))  # 2 to 6: 1 s of the first chunk, 1 s of the second
    write(tmp_path, step + 1, 110.0, [(-2, 1)], (4, 4))  # nothing; the chunk belongs to the step before
    found = figures(tmp_path)
    assert found["steps"] == 2 and found["step_s"] == 10.0 and found["train_s"] == 1.0
    assert found["teach_s"] == 4.0 and found["share"] == pytest.approx(0.4)
    assert found["hidden"] == pytest.approx(2 / 8)
