"""Everything that a killed attempt did after its checkpoint is set aside, and the rest stays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hpcrl.checkpoint.commit import find_latest
from hpcrl.checkpoint.lineage import abandon_after, cut_metrics, gaps
from hpcrl.system.files import steps_in
from tests.checkpoint.test_commit import flip, save


def make_run(run: Path) -> None:
    for step in (2, 4):
        save(run / "checkpoints", step)
    for step in range(1, 7):
        (run / "rollouts" / f"step_{step:06d}").mkdir(parents=True)
        (run / "rollouts" / f"step_{step:06d}" / "rank_00001.h5").write_text(str(step))
    (run / "validation").mkdir()
    for name in ("step_000000.jsonl", "step_000004.jsonl", "step_000006.jsonl", ".step_000006.jsonl.tmp", "own.jsonl"):
        (run / "validation" / name).write_text(name)
    rows = [json.dumps({"step": step}) + "\n" for step in range(7)]
    (run / "metrics.jsonl").write_text("".join(rows) + '{"step": 3, "torn')


def metric_steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines() if line.endswith("}")]


def test_everything_past_the_checkpoint_is_set_aside(tmp_path: Path) -> None:
    make_run(tmp_path)
    moved = abandon_after(tmp_path, 4, attempt=2)
    aside = tmp_path / "abandoned/2"
    assert steps_in(tmp_path / "rollouts") == [1, 2, 3, 4] and steps_in(aside / "rollouts") == [5, 6]
    assert metric_steps(tmp_path / "metrics.jsonl") == [0, 1, 2, 3, 4]
    assert metric_steps(aside / "metrics.jsonl") == [5, 6]
    assert (aside / "metrics.jsonl").read_text().endswith('"torn')
    assert steps_in(tmp_path / "checkpoints") == [2, 4]
    assert [line.split(" moved")[0] for line in moved] == [
        "rollouts of steps 5 to 6",
        "validation of steps 6 to 6",
        "3 lines of metrics.jsonl after step 4",
    ]
    assert (aside / "validation/step_000006.jsonl").read_text() == "step_000006.jsonl"
    left = sorted(path.name for path in (tmp_path / "validation").iterdir())
    assert left == [".step_000006.jsonl.tmp", "own.jsonl", "step_000000.jsonl", "step_000004.jsonl"]
    assert abandon_after(tmp_path, 4, attempt=3) == [] and not (tmp_path / "abandoned/3").exists()


def test_a_damaged_checkpoint_is_set_aside_before_anything_else(tmp_path: Path) -> None:
    make_run(tmp_path)
    flip(tmp_path / "checkpoints/step_000004/state.json")
    latest = find_latest(tmp_path / "checkpoints")
    assert latest.manifest is not None and latest.manifest.step == 2
    moved = abandon_after(tmp_path, 2, attempt=2)
    assert moved[0].startswith("checkpoint step_000004 renamed to step_000004.abandoned-2")
    assert steps_in(tmp_path / "checkpoints") == [2] and steps_in(tmp_path / "rollouts") == [1, 2]
    assert (tmp_path / "checkpoints/LATEST").read_text() == "step_000002\n"
    assert find_latest(tmp_path / "checkpoints").problems == []
    save(tmp_path / "checkpoints", 4, attempt=2)  # the same step again; the damaged checkpoint is set aside
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["LATEST", "step_000002", "step_000004"]


def test_a_branch_keeps_the_later_checkpoints(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "timeline").mkdir()
    for name in ("step_000002.jsonl", "step_000003.jsonl", "step_3.jsonl", "notes"):
        (tmp_path / "timeline" / name).touch()
    moved = abandon_after(tmp_path, 2, attempt=5, branch=True)
    aside = tmp_path / "abandoned/5"
    assert steps_in(tmp_path / "checkpoints") == [2] and steps_in(aside / "checkpoints") == [4]
    assert find_latest(aside / "checkpoints").path == aside / "checkpoints/step_000004", "still whole"
    assert [path.name for path in (aside / "timeline").iterdir()] == ["step_000003.jsonl"]
    assert moved[0] == f"checkpoint step_000004 moved to {aside / 'checkpoints'}"
    save(tmp_path / "checkpoints", 4, attempt=5)
    assert steps_in(tmp_path / "checkpoints") == [2, 4] and steps_in(aside / "checkpoints") == [4]


def test_a_run_that_starts_over_sets_everything_aside(tmp_path: Path) -> None:
    make_run(tmp_path)
    abandon_after(tmp_path, -1, attempt=2)
    assert steps_in(tmp_path / "rollouts") == [] and (tmp_path / "metrics.jsonl").read_text() == ""
    assert metric_steps(tmp_path / "abandoned/2/metrics.jsonl") == [0, 1, 2, 3, 4, 5, 6]
    assert abandon_after(tmp_path / "fresh", -1, attempt=1) == []


@pytest.mark.parametrize("line", ['{"step": "3"}', '{"step": [1]}', "[" * 100_000, "null", '{"step": null}'])
def test_a_line_without_a_step_is_set_aside_too(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    assert cut_metrics(tmp_path, 2, attempt=2) == 1
    assert metric_steps(tmp_path / "metrics.jsonl") == [1, 2]


def test_missing_history_is_named(tmp_path: Path) -> None:
    make_run(tmp_path)
    abandon_after(tmp_path, 4, attempt=2)
    assert gaps(tmp_path, 4, rollouts=True) == gaps(tmp_path, -1, rollouts=True) == []
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"step": 2}\n{"st\xff\xff": 3}\n')
    shutil.rmtree(tmp_path / "rollouts/step_000001")
    (tmp_path / "rollouts/step_000003/rank_00001.h5").unlink()
    assert gaps(tmp_path, 4, rollouts=True) == [
        f"{tmp_path}/metrics.jsonl lacks steps 1, 3 to 4 (of 4): damaged, or removed",
        f"{tmp_path}/rollouts lacks steps 1, 3 (of 4): damaged, or removed",
    ]
    (tmp_path / "metrics.jsonl").unlink()
    (said,) = gaps(tmp_path, 20, rollouts=False)
    assert said.startswith(f"{tmp_path}/metrics.jsonl lacks steps 1 to 20 (of 20)")
