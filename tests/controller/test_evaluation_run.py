"""An evaluation alone: parts, what a kill leaves, and the page."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from hpcrl.config import load
from hpcrl.controller.evaluation import Evaluation
from hpcrl.controller.evaluation_page import evaluation_page
from hpcrl.controller.evaluation_run import ROUNDS, EvaluationRun
from hpcrl.controller.guard import Stopped
from hpcrl.data.source import RowOrigin
from hpcrl.metrics.evaluated import summarised
from hpcrl.metrics.responses import as_lines, header, partial_file, read_responses, responses_file
from hpcrl.pipelines.evaluate import evaluate
from hpcrl.rollout.types import Prompt
from hpcrl.run_folder import SupersededError, open_run
from tests.metrics.test_responses import response

pytestmark = pytest.mark.usefixtures("console")
SETS = {"a": {"samples": 1}, "b": {"samples": 2}}


class Answers:
    """In place of Evaluation: five prompts of two sets, one slot. `lost` rows are of a replica that is lost once."""

    num_slots = 1

    def __init__(self, lost: Collection[int] = ()):
        self.lost, self.asked = {*lost}, list[list[int]]()
        self.prompts = [(Prompt(n, "ab"[n % 2], 0, n, (), ""), RowOrigin("x", n // 2)) for n in range(5)]

    def header(self, step: int) -> dict[str, Any]:
        return header("m", step, SETS)

    def rows_of(self, places: Collection[int]) -> list[dict[str, Any]]:
        self.asked.append([*places])
        rows = []
        for place in places:
            for k in range(1 + place % 2):
                if place in self.lost and k == place % 2:
                    self.lost.remove(place)
                else:
                    rows.append(response("ab"[place % 2], place // 2, k, float(place == 1), response=f"{place} {k}"))
        return rows


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    config = load(
        ["pipeline=evaluate", "data.val=x.jsonl", "eval.sets.b={samples:2,temperature:1}", f"run_dir={tmp_path}"]
    )
    open_run(config.model_dump(mode="json"), tmp_path, "auto")
    return tmp_path


def make(run_dir: Path, answers: Answers, attempt: int = 1) -> EvaluationRun:
    config = load(["pipeline=evaluate", "data.val=x.jsonl", "eval.sets.b={samples:2,temperature:1}"])
    return EvaluationRun(config, run_dir, attempt, lambda: None, cast(Evaluation, answers))


def test_parts_have_few_responses_and_a_lost_one_is_generated_again(run_dir: Path) -> None:
    answers = Answers(lost=[3])
    evaluate(run := make(run_dir, answers))
    assert ROUNDS == 4 and answers.asked == [[0, 1, 2], [3, 4], [3]]
    head, rows = read_responses(responses_file(run_dir, 0))
    assert head == header("m", 0, SETS) and not partial_file(run_dir).exists()
    assert [(row["set"], row["row"], row["sample"]) for row in rows] == [
        *[("a", 0, 0), ("b", 0, 0), ("b", 0, 1), ("a", 1, 0), ("b", 1, 0), ("b", 1, 1), ("a", 2, 0)]
    ]
    assert run.reason == "evaluated 7 responses to 5 prompts" and "b    2        2        0.500" in run.report()
    assert "val/b/pass@2" in json.loads((run_dir / "evaluation.json").read_bytes())["metrics"]


@pytest.mark.parametrize("left", range(0, 900, 97))
def test_whatever_a_kill_leaves_the_files_are_the_same(run_dir: Path, left: int) -> None:
    """The partial file is cut at any byte after its header."""
    run = make(run_dir, Answers())
    run.store(run.respond(run.next_prompts()))
    whole = partial_file(run_dir).read_bytes()
    begin = whole.index(b"\n") + 1
    partial_file(run_dir).write_bytes(whole[: min(begin + left, len(whole))])
    answers = Answers()
    evaluate(make(run_dir, answers))
    after = {path.name: path.read_bytes() for path in (responses_file(run_dir, 0), run_dir / "evaluation.json")}
    evaluate(make(run_dir, Answers()))  # killed before it was recorded as finished
    assert {path.name: path.read_bytes() for path in (responses_file(run_dir, 0), run_dir / "evaluation.json")} == after
    assert after["step_000000.jsonl"].count(b"\n") == 8
    asked = sorted(place for part in answers.asked for place in part)
    done = whole[begin : begin + left].count(b"\n")
    assert asked == [place for place, needed in enumerate((1, 3, 4, 9, 9)) if done < needed]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (as_lines([header("other", 0, SETS)]), "is of another evaluation; remove it, or use another run_name"),
        (b"", "the first line is no header of an evaluation"),
        (b"\xff\n", "the first line is no header of an evaluation"),
    ],
)
def test_a_partial_file_of_something_else_is_refused(run_dir: Path, content: bytes, line: str) -> None:
    partial_file(run_dir).parent.mkdir()
    partial_file(run_dir).write_bytes(content)
    with pytest.raises(ValueError, match=line):
        make(run_dir, Answers())
    assert partial_file(run_dir).read_bytes() == content


def test_responses_of_other_weights_or_prompts_are_not_mixed(run_dir: Path, tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    (model / "model.safetensors").write_bytes(b"1")

    def begin(answer: str = "") -> EvaluationRun:
        answers = Answers()
        answers.prompts[4] = (replace(answers.prompts[4][0], answer=answer), answers.prompts[4][1])
        words = ["pipeline=evaluate", "data.val=x.jsonl", "eval.sets.b={samples:2,temperature:1}"]
        config = load([*words, f"model.path={model}"])
        return EvaluationRun(config, run_dir, 1, lambda: None, cast(Evaluation, answers))

    run = begin()
    run.store(run.respond(run.next_prompts()))
    before = partial_file(run_dir).read_bytes()
    assert begin().num_done == 3
    said = "partial.jsonl is from before files of the model or of the data changed; remove it, or use another run_name"
    with pytest.raises(ValueError, match=said):
        begin(answer="2")
    os.utime(model / "model.safetensors", (1, 1))  # other weights of the same size
    with pytest.raises(ValueError, match=said):
        begin()
    assert partial_file(run_dir).read_bytes() == before


def test_a_signal_stops_between_two_parts_and_another_owner_gets_no_rows(run_dir: Path) -> None:
    run = make(run_dir, Answers())
    run.store(run.respond(run.next_prompts()))
    before = partial_file(run_dir).read_bytes()
    run.stop(15)
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        run.next_prompts()
    (run_dir / "owners" / "0002").write_text("{}")
    with pytest.raises(SupersededError):
        run.store([response("a", 2, 0, 1.0)])
    assert partial_file(run_dir).read_bytes() == before


def test_texts_of_models_stay_text_on_the_page() -> None:
    hostile = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    prompt = [{"role": hostile, "content": hostile}]
    rows = [
        response(hostile, n, 0, 0.5, prompt=prompt, response=hostile, answer=hostile, error=hostile) for n in range(60)
    ]
    rows.append(response("played", 0, 0, 1.0, response=[{"role": "assistant", "content": "x" * 30_000}]))
    told = summarised(header(hostile, 0, {name: {"samples": 1} for name in (hostile, "played")}), rows)
    page = evaluation_page(hostile, told, rows).decode()
    assert "<script" not in page and "<img" not in page and "default-src 'none'" in page
    assert page.count("&lt;script&gt;") > 50 * 5 and ": 50 of 60 responses</h2>" in page
    assert "[... 10000 characters ...]" in page and len(page) < 200_000
