"""A run whose reward executes what the model writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT
from tests.e2e.program import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 3
WORDS = f"""
max_steps={NUM_STEPS} save_every=0 eval_every=3 eval.num_prompts=4 rollout.num_prompts=4 rollout.group_size=4
rollout.max_new_tokens=16 data.max_prompt_tokens=32 trainer.lr=1e-3
reward.default.name=code reward.default.num_processes=2 reward.default.timeout_s=60
""".split()


def test_generated_programs_are_executed_and_rewarded(tmp_path: Path, program_model: Path, digit_data: Path) -> None:
    rows = [json.loads(line) for line in digit_data.read_text().splitlines()]
    cases = [{"prompt": row["prompt"], "answer": [{"stdin": "", "stdout": row["answer"]}]} for row in rows]
    data, run_dir = tmp_path / "programs.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps(row) + "\n" for row in cases))
    inputs = [f"model.path={program_model}", f"data.train={data}", f"data.val={data}", *WORDS]
    start = Start(run_dir, inputs, {"PYTHONPATH": str(ROOT)})
    assert start.wait(300.0) == ExitCode.DONE, start.text
    assert not start.processes(), "no sandbox outlives the run"
    logs = "".join(path.read_text() for path in (run_dir / "logs").rglob("*") if path.is_file())
    assert re.search(r"code sandbox of level L[123] \(", logs)
    metrics = read_metrics(run_dir)
    assert all(row["env/default/sandbox_level"] >= 1 for row in metrics if "env/default/sandbox_level" in row)
    assert any("env/default/sandbox_level" in row for row in metrics)
    assert not sum(row.get("scheduler/score_errors", 0.0) for row in metrics)
    answers, seen = {row["prompt"]: row["answer"] for row in rows}, set()
    reader = RolloutReader(run_dir, provisional=True)
    for step in reader.steps():
        rollouts = reader.read(step)
        for row, reward in enumerate(rollouts.batch.rewards.tolist()):
            prompt, response = (message["content"] for message in rollouts.messages(row))
            assert reward == float(response.strip() == f"print({answers[prompt]})"), (step, prompt, response)
            seen.add(reward)
    assert seen == {0.0, 1.0}


def test_rows_without_cases_are_refused_before_the_start(tmp_path: Path, program_model: Path, digit_data: Path) -> None:
    words = [f"model.path={program_model}", f"data.train={digit_data}", f"data.val={digit_data}", *WORDS]
    start = Start(tmp_path / "run", words)
    assert start.wait(300.0) == ExitCode.BAD_INPUT, start.text
    assert re.search(r"digits.jsonl:1: no test cases: expected", start.text)
    assert "data.train has 64 such rows of domain default" in " ".join(start.text.split())
