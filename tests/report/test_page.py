"""The page of the report: what it may load, hostile text, damaged runs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from hpcrl.commands.report import state_in_words
from hpcrl.report.page import embedded, page
from hpcrl.report.run_files import RunFiles
from hpcrl.report.section import ReportSection
from tests.report.synthetic import write_run

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)>"


def make_run(folder: Path, **files: Any) -> RunFiles:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("run_name: x\npipeline: rlvr\nmax_steps: 10\n")
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return RunFiles(folder)


def module(function: Any, name: str = "hpcrl.report.made") -> ModuleType:
    return cast(ModuleType, SimpleNamespace(section=function, __name__=name))


def blocks(text: str) -> dict[str, Any]:
    """The page's data by the id of its block."""
    found = re.findall(r'<script type="application/json" id="([^"]+)">(.*?)</script>', text, re.DOTALL)
    return {name: json.loads(content) for name, content in found}


def test_hostile_text_stays_data(tmp_path: Path) -> None:
    shown = module(lambda run: ReportSection("made", "Made", {"text": HOSTILE}, "overview.js"))
    text = page([make_run(tmp_path / HOSTILE.replace("/", "_"))], [shown])
    assert blocks(text)["data-0-made"] == {"text": HOSTILE}
    assert "alert(1)</script>" not in text and "<img src=x" not in text


def test_embedded_data_is_json_for_every_browser() -> None:
    assert embedded({"a": float("nan"), "b": [float("inf"), 1.5], "c": ("x", Path("p"))}) == (
        '{"a":null,"b":[null,1.5],"c":["x","p"]}'
    )


PIPES = ("config.yaml", "facts.json", "finished.json", "errors.json", "owners/0001", "plan.txt")
PIPES_IN_FOLDERS = ("timeline/step_000003.jsonl", "validation/step_000003.jsonl", "rollouts/step_000003/rank_0000.h5")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", [*PIPES, *PIPES_IN_FOLDERS, "slurm/job-50.log", "abandoned/3/metrics.jsonl"])
def test_a_named_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    state_in_words(folder)
    run = RunFiles(folder)
    assert "report-head" in page([run])
    assert any(name in problem and "not a regular file" in problem for problem in run.problems)


def test_a_section_that_fails_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    def fails(run: RunFiles) -> ReportSection:
        raise KeyError("tokens")

    good = module(lambda run: ReportSection("good", "Good", 1, "overview.js"), "hpcrl.report.good")
    found = blocks(page([make_run(tmp_path / "run")], [module(fails, "hpcrl.report.bad"), good]))
    assert found["report-head"]["runs"][0]["problems"] == ["bad: KeyError: 'tokens'"]
    assert [each["name"] for each in found["report-head"]["sections"]] == ["good"]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / place / "run") for place in ("a", "b")]
    head = blocks(page(runs))["report-head"]
    assert [each["name"] for each in head["runs"]] == [str(tmp_path / place / "run") for place in ("a", "b")]


def test_damaged_files_are_named_and_half_lines_are_left_out(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", facts__json='{"attempts": [', metrics__jsonl='{"step": 1, "a": 2.0}\n{"step": 2, "a"'
    )
    assert run.metrics.column("a").values.tolist() == [2.0] and len(run.metrics) == 1 and run.attempts == []
    assert len(run.problems) == 1 and run.problems[0].startswith("facts.json: ")
    (run.path / "lines.jsonl").write_text('{"a": 1}\nno\n[3]\n{"a": 2}\n{"a": ')
    assert list(run.lines("lines.jsonl")) == [{"a": 1}, {"a": 2}]
    assert run.problems[1:] == ["lines.jsonl: 2 damaged lines are left out"]


@pytest.mark.parametrize("content", ["", "note.txt"])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, content: str) -> None:
    if content:
        (tmp_path / content).touch()
    with pytest.raises(ValueError, match=r"is not a run folder: it has none of config\.yaml"):
        RunFiles(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        RunFiles(tmp_path / "absent")
