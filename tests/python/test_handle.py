"""hpcrl.Run on folders made by hand: being written, never started, damaged."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch

import hpcrl
from hpcrl.checkpoint.commit import Facts, begin, commit, seal_files
from hpcrl.config import ConfigError, load
from hpcrl.config.config_file import write_config
from hpcrl.rollout.batch import Batch
from hpcrl.rollout.store import OutcomeRecord, write_outcomes, write_rollouts
from hpcrl.rollout.types import PromptOutcome, make_sample_id
from hpcrl.run_folder import finish_run, record_submission
from hpcrl.system.files import step_name

METRICS = (
    b'{"step": 0, "val/score/mean": 0.25}\n{"step": 1, "loss": 2.0, "odd": null}\n'
    b'not json\n{"step": 2, "loss": 1.5, "val/score/mean": 0.5}\n{"step": 3, "lo'
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with a configuration and no attempt."""
    values = load(["+experiment=demo", f"run_dir={tmp_path}"]).model_dump(mode="json")
    (tmp_path / "config.yaml").write_bytes(write_config(values, ["+experiment=demo"]))
    return tmp_path


def own(folder: Path, **facts: object) -> None:
    (folder / "owners").mkdir()
    owner = {"since": "2026-11-30T00:00:00+00:00", "host": platform.node()} | facts
    (folder / "owners" / "0001").write_text(json.dumps(owner))


def test_metrics_are_arrays_with_nan_where_missing(folder: Path) -> None:
    (folder / "metrics.jsonl").write_bytes(METRICS)
    metrics = hpcrl.Run(folder).metrics
    assert metrics.steps.tolist() == [0, 1, 2] and sorted(metrics) == ["loss", "odd", "val/score/mean"]
    np.testing.assert_array_equal(metrics["loss"], [np.nan, 2.0, 1.5])
    np.testing.assert_array_equal(metrics["val/score/mean"], [0.25, np.nan, 0.5])
    np.testing.assert_array_equal(metrics["odd"], [np.nan] * 3)
    assert "reward" not in metrics and hpcrl.Run(folder).step == 2
    with pytest.raises(KeyError):
        metrics["step"]


def test_a_data_frame_has_a_column_for_each_metric(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "metrics.jsonl").write_bytes(METRICS)
    metrics = hpcrl.Run(folder).metrics
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        metrics.to_pandas()
    stand_in = SimpleNamespace(DataFrame=lambda data, index: (data, index), Index=lambda values, name: (values, name))
    monkeypatch.setitem(sys.modules, "pandas", stand_in)
    columns, (steps, name) = cast(Any, metrics.to_pandas())
    assert list(columns) == sorted(metrics) and name == "step" and steps.tolist() == [0, 1, 2]


def test_reading_imports_no_torch(folder: Path) -> None:
    (folder / "metrics.jsonl").write_bytes(METRICS)
    code = f"""
import sys, hpcrl
assert not [name for name in sys.modules if name.startswith("hpcrl.")], "import hpcrl is to cost nothing"
run = hpcrl.Run({str(folder)!r})
run.config, run.state, run.status, run.metrics, run.step, run.checkpoints(), run.episodes(), run.validation()
hpcrl.plan, hpcrl.train, hpcrl.Generator
assert not {{"torch", "transformers", "h5py"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_run_that_never_started(tmp_path: Path) -> None:
    run = hpcrl.Run(tmp_path)
    assert run.state == "never started" and run.config == {} and len(run.metrics) == 0 and run.step == 0
    assert not [*run.samples(), *run.episodes(), *run.checkpoints(), *run.validation()] and not run.stop()
    with pytest.raises(ValueError, match="hf: not written yet, the run is never started"):
        _ = run.hf
    with pytest.raises(hpcrl.RunFailed, match="never started") as error:
        run.wait(poll_s=0.01)
    assert error.value.exit_code == 1


def test_a_submitted_run_has_the_submitted_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no Slurm
    (tmp_path / "slurm").mkdir()
    record_submission(tmp_path, [71, 72])
    (tmp_path / "slurm" / "submitted.yaml").write_text("# words\nmax_steps: 7\n")
    run = hpcrl.Run(tmp_path)
    assert run.config == {"max_steps": 7} and run.job_id == 71 and run.state == "unknown"
    with pytest.raises(TimeoutError, match=r"is not finished after 0\.05 s: unknown: job 72"):
        run.wait(timeout_s=0.05, poll_s=0.01)


@pytest.mark.parametrize("name", ["nothing/here", "."])
def test_what_is_no_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=f"{re.escape(name)} is not a run folder"):
        hpcrl.Run(name)


def test_a_name_in_runs_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (folder / "runs").mkdir()
    (folder / "runs" / "mine").mkdir()
    (folder / "runs" / "mine" / "config.yaml").write_text("max_steps: 3\n")
    monkeypatch.chdir(folder)
    assert hpcrl.Run("mine").config == {"max_steps": 3} and hpcrl.Run("mine").path.is_absolute()


def test_a_damaged_configuration_is_named(folder: Path) -> None:
    (folder / "config.yaml").write_text("{")
    with pytest.raises(ConfigError, match=f"{folder}/config.yaml cannot be read"):
        _ = hpcrl.Run(folder).config


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield psutil.Process(child.pid)
    child.kill()
    child.wait()


def test_stop_sends_sigterm_to_the_owner_and_wait_tells_how_it_ended(folder: Path, sleeper: psutil.Process) -> None:
    own(folder, pid=sleeper.pid, process_start=sleeper.create_time())
    run = hpcrl.Run(folder)
    assert run.state == "running" and run.stop()
    assert sleeper.wait(10) == -signal.SIGTERM
    assert run.state == "lost" and not run.stop()
    with pytest.raises(hpcrl.RunFailed, match="lost: attempt 1 ended without a report"):
        run.wait(poll_s=0.01)


def test_stop_leaves_another_process_with_the_same_pid(folder: Path) -> None:
    own(folder, pid=os.getpid(), process_start=psutil.Process().create_time() - 1000)
    assert not hpcrl.Run(folder).stop()


def test_a_run_on_another_host_is_not_stopped_from_here(folder: Path) -> None:
    own(folder, pid=1, process_start=1.0, host="elsewhere")
    with pytest.raises(ValueError, match="pid 1 runs on host elsewhere; stop it there"):
        hpcrl.Run(folder).stop()


def test_wait_returns_a_finished_run(folder: Path) -> None:
    own(folder, pid=1, process_start=1.0, ended="2026-11-30T00:01:00+00:00")
    finish_run(folder, 5, 5, "trained 5 steps")
    run = hpcrl.Run(folder)
    assert run.wait() is run and run.state == "finished" and "finished: trained 5 steps" in run.status


def test_checkpoints_tell_whether_their_files_are_those_committed(folder: Path) -> None:
    root = folder / "checkpoints"
    for step in (2, 4):
        place = begin(root, step, attempt=1)
        (place / "weights").write_bytes(b"abc")
        commit(root, step, place, seal_files(place, ["weights"]), Facts(attempt=1, world={}), keep=2)
    begin(root, 6, attempt=1)  # a save that is being written
    (root / step_name(4) / "weights").write_bytes(b"abd")
    run = hpcrl.Run(folder)
    assert [(each.step, each.valid) for each in run.checkpoints()] == [(2, True), (4, True)], "sizes are right"
    checked = run.checkpoints(verify=True)
    assert [each.valid for each in checked] == [True, False] and "not what was committed" in checked[1].problem
    (root / step_name(2) / "weights").unlink()
    assert run.checkpoints()[0].problem == "weights is missing" and checked[0].path == root / step_name(2)


def rollouts(folder: Path, step: int, rank: int = 0, num_ranks: int = 1, last_version: int = 0) -> None:
    """Two samples of a prompt of 2 tokens, answered in two turns and in one. `last_version`: of the first one's last
    turn, -1 for an expert's."""
    written = [0, 0, 1, 0, 1, 1, 0, 0, 1]
    turns = [-1, -1, 0, 0, 1, 1, -1, -1, 0]
    batch = Batch(torch.tensor([0, 6, 9]))
    batch.columns |= {
        "token_ids": torch.arange(9), "loss_mask": torch.tensor(written, dtype=torch.bool),
        "gen_logprobs": -torch.ones(9), "versions": torch.tensor([0] * 4 + [last_version] * 2 + [0] * 3).int(),
        "turn_ids": torch.tensor(turns, dtype=torch.int32), "status": torch.tensor([0, 1], dtype=torch.int8),
        "rewards": torch.tensor([1.0, -0.5]), "scores": torch.tensor([1.0, 0.0]),
        "position_ids": torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2]), "group_ids": torch.tensor([3, 3]),
        "sample_ids": torch.tensor([make_sample_id(3, 0, member) for member in (0, 1)]), "weights": torch.ones(2),
    }  # fmt: skip
    asked = [
        {"role": "user", "content": "hint"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "?"},
    ]
    first = [*asked, {"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}]
    first += [{"role": "assistant", "content": "<script>b"}]
    batch.texts["messages"] = [json.dumps(first), json.dumps([*asked, {"role": "assistant", "content": "c"}])]
    place = folder / "rollouts" / step_name(step)
    write_rollouts(place, rank, num_ranks, batch, {})
    write_outcomes(place, [OutcomeRecord(3, 0, PromptOutcome.TRAINED, domain="d", metrics=({"part": 2.0}, {}))])


def test_samples_have_prompt_response_and_reward(folder: Path) -> None:
    rollouts(folder, 1)
    first, second = hpcrl.Run(folder).samples()
    assert (first.prompt, first.response) == ("hint\n\nno\n\n?", "a\n\n<script>b")
    assert (second.prompt, second.response) == ("hint\n\nno\n\n?", "c")
    assert (first.reward, second.reward, second.score) == (1.0, -0.5, 0.0)
    assert (first.step, first.domain, first.prompt_id, second.member) == (1, "d", 3, 1)
    assert (first.finish_reason, second.finish_reason) == ("stop", "length") and first.metrics == {"part": 2.0}
    assert (first.num_tokens, second.num_tokens) == (3, 1) and second.token_ids.tolist() == [6, 7, 8]
    assert first.logprobs.tolist() == [0, 0, -1, 0, -1, -1]


def test_an_experts_tokens_are_not_the_models(folder: Path) -> None:
    rollouts(folder, 1, last_version=-1)
    first, _ = hpcrl.Run(folder).samples()
    assert first.written.tolist() == [False, False, True, False, False, False] and first.num_tokens == 1
    assert first.logprobs.tolist() == [0, 0, -1, 0, 0, 0] and first.response == "a\n\n<script>b"


def test_a_step_that_is_being_written_is_skipped_unless_asked_for(folder: Path) -> None:
    rollouts(folder, 1)
    rollouts(folder, 2, num_ranks=2)  # the other rank's file is not there yet
    run = hpcrl.Run(folder)
    assert {sample.step for sample in run.samples()} == {1} and len([*run.samples(1)]) == 2
    with pytest.raises(ValueError, match="holds files of 1 ranks"):
        next(run.samples(2))
    with pytest.raises(ValueError, match="has no rollouts of step 9; it has 1 to 2"):
        next(run.samples(9))


def test_episodes_are_listed(folder: Path) -> None:
    for step, name in ((10, "worst"), (2, "best")):
        place = folder / "episodes" / step_name(step) / "lake"
        place.mkdir(parents=True)
        (place / f"{name}.txt").write_text("score 1, reward 1, 2 turns\n")
        (place / f"{name}.html").touch()
    found = hpcrl.Run(folder).episodes()
    assert [(each.step, each.domain, each.kind) for each in found] == [(2, "lake", "best"), (10, "lake", "worst")]
    assert found[0].text.startswith("score 1")


def test_validation_responses_without_header_and_half_lines(folder: Path) -> None:
    (folder / "validation").mkdir()
    head = {"format": 1, "model": "m", "step": 10, "sets": {}}
    rows = [{"set": "a", "response": "x", "score": 1.0}, {"set": "a", "response": "y", "score": 0.0}]
    text = "".join(json.dumps(row) + "\n" for row in [head, *rows])
    (folder / "validation" / "step_000010.jsonl").write_text(text + '{"set": "a", "resp')
    (folder / "validation" / "step_000002.jsonl").write_text(json.dumps(head) + "\n")
    run = hpcrl.Run(folder)
    assert run.validation() == rows and run.validation(2) == []
    with pytest.raises(ValueError, match=r"validation has no responses of step 3; it has 2, 10"):
        run.validation(3)
