"""A generation of rows: parts, what a kill leaves, what changes between attempts, and whose the target is."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hpcrl.config import load
from hpcrl.controller.generation_run import GenerationRun
from hpcrl.controller.guard import Stopped
from hpcrl.controller.responder import Responder
from hpcrl.data.messages import one_turn
from hpcrl.data.row_files import as_line
from hpcrl.metrics.generated import count_done, work_file, written_file
from hpcrl.pipelines.generate import generate
from hpcrl.rollout.types import Prompt, PromptOutcome
from hpcrl.run_folder import SupersededError, open_run
from tests.metrics.test_responses import response

pytestmark = pytest.mark.usefixtures("console")
ORDER = (4, 0, 6, 1, 5, 2, 3)
TOO_LONG, UNUSABLE = 6, 5


class Prompts:
    """In place of PromptSource: seven rows in another order, two of them unusable."""

    domains = ("a",)

    def __init__(self, digest: str):
        self.identity = {"0 x.jsonl": digest}

    def in_turn(self) -> np.ndarray:
        return np.array(ORDER)

    def of_row(self, row: int) -> Prompt | PromptOutcome:
        if row in (TOO_LONG, UNUSABLE):
            return PromptOutcome.TOO_LONG if row == TOO_LONG else PromptOutcome.FAILED
        return Prompt(row, "a", 0, row, (), "", messages=[{"role": "user", "content": f"p{row}"}])


class Responses:
    """In place of Responder: one slot. Prompts of `lost` are of a replica that is lost once."""

    num_slots = 1
    turns = SimpleNamespace(message=one_turn)

    def __init__(self, digest: str = "1", lost: Collection[int] = ()):
        self.source, self.lost, self.asked = Prompts(digest), {*lost}, list[list[int]]()

    def respond(self, prompts: Sequence[Prompt], samples: int) -> Mapping[int, Sequence[Mapping[str, Any]]]:
        self.asked.append([prompt.row for prompt in prompts])
        found = {}
        for prompt in prompts:
            row = prompt.row
            if row in self.lost:
                self.lost.remove(row)
            else:
                found[row] = [
                    response("a", row, n, float(n == row % 2), response=f"r{row}{n}\u00e9") for n in range(samples)
                ]
        return found


WORDS = ["pipeline=generate", "data.train=x.jsonl", "generate.samples=2", "reward.default.name=exact_match"]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    open_run(load([*WORDS, f"run_dir={tmp_path / 'run'}"]).model_dump(mode="json"), tmp_path / "run", "auto")
    return tmp_path / "run"


def make(run_dir: Path, responses: Responses | None = None, *words: str) -> GenerationRun:
    config = load([*WORDS, *words])
    return GenerationRun(config, run_dir, 1, lambda: None, cast(Responder, responses or Responses()))


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_each_prompt_is_responded_to_once_in_parts_and_in_order(run_dir: Path) -> None:
    """A prompt of a lost replica is responded to again before its part is stored."""
    responses = Responses(lost=[0])
    generate(run := make(run_dir, responses, "generate.min_score=1"))
    assert responses.asked == [[4, 0], [0], [1, 2], [3]]
    rows = rows_in(run_dir / "rows.jsonl")
    told = [(row["messages"][0]["content"], row["messages"][1]["content"], row["score"]) for row in rows]
    assert told == [(f"p{row}", f"r{row}{row % 2}\u00e9", 1.0) for row in (4, 0, 1, 2, 3)]
    assert run.reason == "wrote 5 rows from 5 prompts" and not work_file(run_dir).exists()
    said = run.report().splitlines()
    for line in (
        "  too long                  1  rows of the data left out",
        "responses                  10  40 tokens, mean score 0.500",
        "  below min_score           5  dropped",
        "rows                        5  20 tokens, mean score 1.000",
    ):
        assert line in said
    assert count_done(run_dir) == 5


def test_a_limit_counts_prompts_that_are_responded_to(run_dir: Path) -> None:
    responses = Responses()
    generate(make(run_dir, responses, "generate.num_prompts=3"))
    assert responses.asked == [[4, 0], [1]] and len(rows_in(run_dir / "rows.jsonl")) == 6


def test_pairs_and_prompts_without_one_are_counted(run_dir: Path) -> None:
    class Equal(Responses):
        def respond(self, prompts: Sequence[Prompt], samples: int) -> Mapping[int, Sequence[Mapping[str, Any]]]:
            found = super().respond(prompts, samples)
            return {row: [{**each, "score": 0.0} if row == 4 else each for each in own] for row, own in found.items()}

    generate(run := make(run_dir, Equal(), "generate.form=pairs"))
    rows = rows_in(run_dir / "rows.jsonl")
    assert [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows] == [
        (f"r{row}{row % 2}\u00e9", f"r{row}{1 - row % 2}\u00e9") for row in (0, 1, 2, 3)
    ]
    assert "  equal scores           1  no pair" in run.report().splitlines()


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_whatever_a_kill_leaves_the_file_is_the_same(run_dir: Path, tmp_path: Path, ending: str) -> None:
    """The work file is cut at any byte after its header; the next attempt generates only what is missing."""
    words = [f"generate.target={tmp_path / f'rows.{ending}'}", "generate.min_score=0.5"]
    run = make(run_dir, None, *words)
    for _ in range(2):
        run.store(run.respond(run.next_part()))
    stored, written = work_file(run_dir).read_bytes(), set[tuple[bytes, bytes]]()
    begin = stored.index(b"\n") + 1
    for left in (*range(0, len(stored) - begin, 53), len(stored) - begin - 1, len(stored) - begin):
        work_file(run_dir).write_bytes(stored[: begin + left])
        generate(make(run_dir, responses := Responses(), *words))
        done = stored[begin : begin + left].count(b"\n")
        asked = [row for part in responses.asked for row in part]
        assert asked == [row for row in ORDER[done:] if row not in (TOO_LONG, UNUSABLE)], left
        paths = tmp_path / f"rows.{ending}", run_dir / "generation.json"
        written.add((paths[0].read_bytes(), paths[1].read_bytes()))
        for path in paths:
            path.unlink()
    generate(make(run_dir, whole := Responses(), *words))
    assert sum(map(len, whole.asked)) == 5
    assert written == {(paths[0].read_bytes(), paths[1].read_bytes())}


def test_a_damaged_line_in_the_middle_is_generated_again(run_dir: Path) -> None:
    run = make(run_dir)
    run.store(run.respond(run.next_part()))
    lines = work_file(run_dir).read_bytes().splitlines(keepends=True)
    work_file(run_dir).write_bytes(b"".join([*lines[:1], b"\0" * 30 + b"\n", *lines[2:]]))
    generate(make(run_dir, responses := Responses()))
    assert responses.asked[0][0] == ORDER[0]
    assert [row["messages"][0]["content"] for row in rows_in(run_dir / "rows.jsonl")][::2] == [
        f"p{row}" for row in (4, 0, 1, 2, 3)
    ]


def test_a_kill_after_the_file_has_its_name_generates_nothing(run_dir: Path, tmp_path: Path) -> None:
    """Killed between the publication and the record of the run's end."""
    generate(make(run_dir))
    before = (run_dir / "rows.jsonl").read_bytes()
    (run_dir / "generation.json").unlink()
    generate(run := make(run_dir, responses := Responses()))
    assert not responses.asked and (run_dir / "rows.jsonl").read_bytes() == before
    assert run.reason == "wrote 10 rows from 5 prompts" and (run_dir / "generation.json").exists()
    assert not [*run_dir.glob(".*.tmp*")]


def test_a_file_of_another_run_is_neither_replaced_nor_taken_for_ones_own(run_dir: Path, tmp_path: Path) -> None:
    (target := tmp_path / "rows.jsonl").write_text("{}\n")
    said = r"generate\.target: .*rows\.jsonl exists and is not this run's; name another file or remove it"
    with pytest.raises(ValueError, match=said):
        make(run_dir, None, f"generate.target={target}")
    target.unlink()
    run = make(run_dir, None, f"generate.target={target}")
    while part := run.next_part():
        run.store(run.respond(part))
    target.write_text("{}\n")  # another run is faster
    with pytest.raises(ValueError, match=said):
        run.write()
    assert target.read_text() == "{}\n"
    generate(make(run_dir, responses := Responses(), f"generate.target={tmp_path / 'b.jsonl'}"))
    assert not responses.asked and len(rows_in(tmp_path / "b.jsonl")) == 10, "nothing is generated again"
    assert json.loads(written_file(run_dir).read_bytes())["target"] == str(tmp_path / "b.jsonl")


def test_a_target_in_a_missing_folder_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generate\.target: .*/none is no folder; make it, or name another file"):
        make(run_dir, None, f"generate.target={tmp_path / 'none' / 'rows.jsonl'}")


def test_rows_of_other_weights_or_data_are_not_mixed(run_dir: Path, tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    (model / "model.safetensors").write_bytes(b"1")
    word = f"model.path={model}"
    run = make(run_dir, None, word)
    run.store(run.respond(run.next_part()))
    before = work_file(run_dir).read_bytes()
    said = r"prompts\.jsonl is from before {} changed; restore them, or start anew with another run_name"
    with pytest.raises(ValueError, match=said.format(r"data\.train \(0 x\.jsonl\)")):
        make(run_dir, Responses(digest="2"), word)
    os.utime(model / "model.safetensors", (1, 1))  # other weights of the same size
    with pytest.raises(ValueError, match=said.format("files of the model")):
        make(run_dir, None, word)
    assert work_file(run_dir).read_bytes() == before


def test_a_signal_stops_between_two_parts_and_another_owner_gets_no_rows(run_dir: Path) -> None:
    run = make(run_dir)
    run.store(run.respond(run.next_part()))
    before = work_file(run_dir).read_bytes()
    assert count_done(run_dir) == before.count(b"\n") - 1 > 0
    run.stop(15)
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        run.next_part()
    (run_dir / "owners" / "0002").write_text("{}")
    with pytest.raises(SupersededError):
        run.store([{"row": 1, "counts": {}, "rows": []}])
    assert work_file(run_dir).read_bytes() == before


def test_without_a_reward_rows_have_no_score(run_dir: Path) -> None:
    config = load(["pipeline=generate", "data.train=x.jsonl", "generate.samples=2"])
    generate(run := GenerationRun(config, run_dir, 1, lambda: None, cast(Responder, Responses())))
    assert all("score" not in row for row in rows_in(run_dir / "rows.jsonl")) and "score" not in run.report()
    assert as_line({"a": "\u00e9"}) == b'{"a": "\xc3\xa9"}\n'
