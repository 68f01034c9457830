"""What the overview names besides attempts: best checkpoint, branches, scores, hangs, profiles; status its scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.commands import track
from hpcrl.commands.status import describe, line
from hpcrl.config import Config
from hpcrl.config.config_file import write_config
from hpcrl.metrics import plot
from hpcrl.report.attempt_history import histories
from hpcrl.report.index import entry
from hpcrl.report.overview import section
from hpcrl.report.run_files import RunFiles
from hpcrl.system.exit_codes import ExitCode
from tests.report.synthetic import write_run

SETS = {
    "easy": {"score": 0.25, "score_stderr": 0.125, "prompts": 8, "samples": 4, "pass@2": 0.5, "maj@4": 0.375},
    "one": {"score": 1.0, "score_stderr": None, "prompts": 1, "samples": 1},
}


def what(run: Path) -> dict[str, str]:
    return dict(section(RunFiles(run)).data["what"])


def evaluated(folder: Path) -> Path:
    folder.mkdir()
    values: dict[str, Any] = {
        "run_name": "e",
        "pipeline": "evaluate",
        "model": {"path": "m"},
        "data": {"train": None, "val": "rows.jsonl"},
        "layout": {"generator": {"num_ranks": 1, "colocate_with": None}},
    }
    parsed = Config.model_validate(values).model_dump(mode="json")
    (folder / "config.yaml").write_bytes(write_config(parsed, []))
    rest = {"response_length": 5.0, "truncated": 0.0, "score_errors": 0}
    sets = {name: own | rest for name, own in SETS.items()}
    (folder / "evaluation.json").write_text(json.dumps({"format": 1, "sets": sets, "metrics": {}}))
    return folder


def test_files_of_a_run_are_named_where_they_exist(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert not {"best checkpoint", "hangs", "profiles"} & set(what(run))
    (run / "checkpoints").mkdir()
    best = {"step": 20, "metric": "val/score/mean", "mode": "max", "value": 0.41}
    (run / "checkpoints" / "BEST").write_text(json.dumps(best))
    (run / "logs" / "attempt_0002" / "hang.txt").write_text("rank 1 waits for rank 2\n")
    for name in ("rank_0000.json.gz", "rank_0001.json.gz"):
        (run / "profiles" / "step_000003").mkdir(parents=True, exist_ok=True)
        (run / "profiles" / "step_000003" / name).touch()
    found = what(run)
    assert found["best checkpoint"] == "step 20, val/score/mean 0.41 (checkpoints/BEST)"
    assert found["hangs"] == "logs/attempt_0002/hang.txt"
    assert found["profiles"] == "profiles/step_000003: rank_0000.json.gz, rank_0001.json.gz"
    (run / "checkpoints" / "BEST").write_text('{"step": "20"}')
    assert "best checkpoint" not in what(run)


def test_steps_left_for_a_branch_are_not_called_lost(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert what(run)["lost"] == "3 step(s) were computed again" and section(RunFiles(run)).data["branches"] == []
    facts = json.loads((run / "facts.json").read_text())
    facts["attempts"][2]["branch"] = {"from": 12, "changes": ["trainer.lr: 0.1 -> 0.01"], "reason": "diverged"}
    (run / "facts.json").write_text(json.dumps(facts))
    assert what(run)["lost"] == "nothing: no step was computed again; 3 step(s) were left for a branch"
    names = [phase["name"] for phase in section(RunFiles(run)).data["hours"]]
    assert "left for a branch" in names and "lost and computed again" not in names
    log = run / "logs" / "attempt_0003" / "rank_0000.log"
    log.write_text(log.read_text().replace("resumed from step_", "branch from step_"))
    assert histories(RunFiles(run))[2].resumed_from == 12
    assert section(RunFiles(run)).data["branches"] == ["attempt 3 from step 12: trainer.lr: 0.1 -> 0.01 (diverged)"]


def test_the_scores_of_an_evaluation_alone_are_shown(tmp_path: Path) -> None:
    run = evaluated(tmp_path / "evaluation")
    data = section(RunFiles(run)).data
    assert [row[:5] for row in data["evaluation"]["rows"]] == [
        ["easy", "8", "4", "0.250 ± 0.125", "@2=0.500"],
        ["one", "1", "1", "1.000", "-"],
    ]
    assert not {"steps", "algorithm"} & set(dict(data["what"])) and data["hours"] == []
    assert " ".join(line(run, None, 0.0).split()) == "evaluation never started easy 0.250 ± 0.125 one 1.000"
    assert entry(RunFiles(run), "e.html").values == "easy 0.250 ± 0.125, one 1.000"
    text = describe(run, None, 0.0)
    assert "scores   easy 0.250 ± 0.125\n         one 1.000" in text
    (run / "evaluation.json").write_text('{"sets": {"easy": {}}}')
    damaged = RunFiles(run)
    assert section(damaged).data["evaluation"] is None and damaged.problems[0].startswith("evaluation.json: KeyError")
    assert line(run, None, 0.0).split()[-2:] == ["0", "responses"]


def test_runs_are_plotted_and_tracked_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs" / "mine", cluster={"name": "local"})
    monkeypatch.chdir(tmp_path)
    assert plot.main(["mine"]) == ExitCode.DONE and (tmp_path / "runs" / "mine" / "plot.png").is_file()
    assert plot.main(["other"]) == ExitCode.BAD_INPUT and track.main(["other", "tensorboard"]) == ExitCode.BAD_INPUT
    assert "other is not a run folder" in capsys.readouterr().err
    assert track.main(["mine", "tensorboard"]) == ExitCode.DONE
    assert capsys.readouterr().out.endswith("tensorboard has the 31 rows of runs/mine\n")
