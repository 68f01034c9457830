"""pipeline=generate before anything starts: the plan, unread keys, bad input."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hpcrl.commands import status
from hpcrl.config import ConfigError, load
from hpcrl.config.config_file import write_config
from hpcrl.launch.job import _count
from hpcrl.launch.plan import describe
from hpcrl.launch.prepare import prepare
from hpcrl.metrics.generated import work_file
from hpcrl.run_folder.changes import permitted_changes

GENERATE = ["pipeline=generate", "layout=single", "data.max_prompt_tokens=64"]
ROWS = [{"prompt": f"row {n}", "tag": "ab"[n % 2]} for n in range(6)]


@pytest.fixture
def rows(tmp_path: Path) -> str:
    (path := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return f"data.train={path}"


def refused(at: Path, *words: str) -> str:
    with pytest.raises(ConfigError) as error:
        prepare([*GENERATE, f"run_dir={at / 'run'}", *words])
    return str(error.value)


def test_the_plan_names_the_work_and_the_prompts(tmp_path: Path, rows: str) -> None:
    """Rows without answer and reward are enough, and a recipe's other keys are not in the way."""
    words = ["generate.samples=4", "rollout.temperature=0.7", f"generate.target={tmp_path / 'out.parquet'}"]
    further = ["generate.num_prompts=5", "generate.truncated=keep"]
    config, layout, model, run, shown = prepare([*GENERATE, f"run_dir={tmp_path / 'run'}", rows, *words, *further])
    plan = describe(config, layout, model, run, shown)
    assert f"work    generate 4 response(s) to up to 5 prompts, at temperature 0.7; a row each; to {tmp_path}" in plan
    assert "(6 rows)" in plan and "example" in plan and "trained" not in plan
    assert not layout.ranks["trainer"] and layout.ranks["generator"] and config.data.val is None
    assert prepare(["+experiment=rlvr_tiny", "pipeline=generate", f"run_dir={tmp_path / 'run'}"])[0].data.train


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["generate.samples=0"], "generate.samples: expected at least 1, got 0"),
        (
            ["generate.samples=2", "rollout.temperature=0"],
            "generate.samples: 2 greedy responses to a prompt are all equal; set rollout.temperature above 0",
        ),
        (["generate.form=pairs", "reward.default.name=length"], "generate.samples: 1, but generate.form=pairs"),
        (["generate.keep=3", "generate.samples=2"], "generate.keep: 3 is above generate.samples, which is 2"),
        (["generate.min_score=0.5"], "domain a has no reward, and generate.min_score=0.5 compares scores; set"),
        (["generate.keep=1"], "rows.jsonl:2: domain b has no reward, and generate.keep=1 compares scores"),
        (["generate.form=pairs", "generate.samples=2"], "has no reward, and generate.form=pairs compares scores"),
        (
            ["reward.a.name=repetition", "generate.keep=1"],
            "domain b has no reward, and generate.keep=1 compares scores",
        ),
        (["reward.default.name=exact_match"], "no answer (looked for answer"),
        (
            ["reward.default.name=exact_match", "generate.min_score=2"],
            "generate.min_score: 2, and scores are between 0 and 1, so no response would be kept",
        ),
        (["data.overlong_prompts=truncate"], "data.overlong_prompts: truncate, but rows have whole prompts"),
        (["generate.target=none/x.jsonl"], "none is no folder; make it, or name another file"),
        (["generate.target=taken.jsonl"], "taken.jsonl exists, and nothing is overwritten; name another file"),
        (["generate.target=x.csv"], "generate.target: x.csv ends in neither .jsonl nor .parquet"),
        (["data.val=task:sort_digits"], "data.val: not read here, the generate pipeline only generates"),
        (["eval.samples=2"], "eval.samples: not read here, the generate pipeline only generates"),
        (["rollout.group_size=4"], "rollout.group_size: not read here, the generate pipeline only generates"),
        (["trainer.lr=1"], "trainer.lr: not read here"),
        (["data.train=null"], "data.train: null, but the generate pipeline draws rows from it"),
        (["data.train=task:shapes", "model.tiny.architecture=qwen2_5_vl"], "images, which written rows cannot hold"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    tmp_path: Path, rows: str, monkeypatch: pytest.MonkeyPatch, words: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.jsonl").write_text("")
    assert line in refused(tmp_path, rows, *words)
    assert not (tmp_path / "run").exists()


def test_a_target_that_cannot_be_written_is_refused(tmp_path: Path, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "locked").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder)  # a test of root may write anywhere
    line = refused(tmp_path, rows, f"generate.target={folder}/x.jsonl")
    assert f"generate.target: {folder} is not writable; name a file in another folder" in line


def test_stored_prompts_count_as_progress_and_are_shown(tmp_path: Path) -> None:
    """Else a generation longer than five jobs would not be requeued."""
    words = [*GENERATE, "run_name=rows", f"run_dir={tmp_path}"]
    (tmp_path / "config.yaml").write_bytes(write_config(load(words).model_dump(mode="json"), words))
    (path := work_file(tmp_path)).parent.mkdir()
    counted = []
    for lines in (2, 2, 3, 3):
        path.write_bytes(b"{}\n" * lines + b'{"torn')
        counted.append(_count(tmp_path, "short", None))
    assert counted == [1, 2, 1, 2]
    assert "done     2 prompts have their rows" in status.describe(tmp_path, None, time.time())
    assert status.line(tmp_path, None, time.time()).endswith("2 prompts")


def test_the_target_may_change_between_attempts_and_other_keys_may_not(tmp_path: Path) -> None:
    stored = load([*GENERATE, f"run_dir={tmp_path}"]).model_dump(mode="json")
    (tmp_path / "config.yaml").write_bytes(write_config(stored, GENERATE))
    other = load([*GENERATE, f"run_dir={tmp_path}", "generate.target=b.jsonl"]).model_dump(mode="json")
    assert permitted_changes(other, tmp_path) == ['generate.target: null -> "b.jsonl"']
    other = load([*GENERATE, f"run_dir={tmp_path}", "generate.samples=3"]).model_dump(mode="json")
    with pytest.raises(ConfigError, match=r"generate\.samples"):
        permitted_changes(other, tmp_path)


def test_another_pipeline_does_not_read_its_section() -> None:
    with pytest.raises(ConfigError, match=r"generate\.samples: not read here, the pipeline is sft"):
        load(["pipeline=sft", "generate.samples=2"])
