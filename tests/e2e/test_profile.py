"""Traces of chosen steps and ranks, which change nothing in the run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import ConfigError
from hpcrl.launch.prepare import prepare
from hpcrl.metrics.log import read_metrics
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start

WORDS = [
    "layout=single",
    "max_steps=3",
    "save_every=0",
    "eval_every=0",
    "rollout.num_prompts=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=3",
    "data.max_prompt_tokens=32",
    "rollout.filter_std=false",
    "algorithm.num_mini_batches=2",
    "rollout.save_rollouts=false",
    "reward.default.name=exact_match",
    "trackers=[]",
    "deterministic=true",
    "timeouts.command_s=120",
]


def finished(folder: Path, name: str, model: Path, data: Path, *words: str) -> Start:
    run = Start(folder / name, [f"model.path={model}", f"data.train={data}", *WORDS, *words])
    assert run.wait() == ExitCode.DONE, run.text
    return run


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return [event for event in found if event.get("ph") == "X"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_profiled_step_has_the_products_of_its_commands_and_the_run_is_the_same(
    tmp_path: Path, digit_model: Path, digit_data: Path
) -> None:
    plain = finished(tmp_path, "plain", digit_model, digit_data, "timeline.enabled=false")
    words = "profile.steps=[2]", "profile.ranks=[trainer,0]", "profile.memory=true"
    run = finished(tmp_path, "profiled", digit_model, digit_data, *words)
    folders = [tmp_path / name for name in ("plain", "profiled")]
    weights = [(folder / "hf" / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]
    norms = [[row["actor/grad_norm"] for row in read_metrics(folder)[1:]] for folder in folders]
    assert norms[0] == norms[1] and len(norms[0]) == 3
    assert "profile of" not in plain.text and not (folders[0] / "profiles").exists()
    assert [(folder / "timeline").exists() for folder in folders] == [False, True], "nor does a timeline change it"

    written = sorted(path.relative_to(folders[1] / "profiles") for path in (folders[1] / "profiles").rglob("*.*"))
    assert written == [Path("step_000002/rank_0000.json.gz")]
    assert run.text.count("no snapshot of GPU memory: this rank has no GPU") == 1
    found = events(folders[1] / "profiles" / written[0])
    commands = {event["name"].partition(" #")[0]: event for event in found if " #" in event["name"]}
    assert {"DecodeChunk", "TrainStep"} <= commands.keys()
    for name in ("DecodeChunk", "TrainStep"):
        begin, end = commands[name]["ts"], commands[name]["ts"] + commands[name]["dur"]
        within = [event for event in found if begin <= event["ts"] <= end]
        products = [event for event in within if event["name"] in ("aten::mm", "aten::addmm", "aten::bmm")]
        assert len(products) >= 4 and all(event["args"]["Input Dims"] for event in products), name
    backward = [event for event in found if event["name"].startswith("autograd::engine::evaluate_function: MmBackward")]
    assert backward, "the backward pass of the step"
    assert sum(event["name"].startswith("TrainStep #") for event in found) <= 2, "only of this step"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["profile.steps=[2,7]"], "profile.steps: 7, but the last step is max_steps=3"),
        (["profile.steps=[2]", "profile.ranks=[9]"], "profile.ranks: 9, but the run's last rank is 0"),
        (["profile.steps=[2]", "profile.ranks=[trainers]"], "profile.ranks: 'trainers' is not one of "),
        (["profile.steps=[2]", "profile.ranks=[env]"], "profile.ranks: no rank of this run"),
        (["profile.ranks=[0]"], "profile.ranks: not read here, profile.steps is empty"),
        (["profile.steps=[0]"], "profile.steps"),
    ],
)
def test_steps_and_ranks_that_the_run_lacks_are_refused(
    tmp_path: Path, digit_model: Path, digit_data: Path, words: list[str], told: str
) -> None:
    arguments = [f"run_dir={tmp_path / 'run'}", f"model.path={digit_model}", f"data.train={digit_data}", *WORDS, *words]
    with pytest.raises(ConfigError) as refused:
        prepare(arguments)
    assert any(problem.startswith(told) for problem in refused.value.problems), refused.value.problems
