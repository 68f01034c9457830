"""A reward model trained on pairs: it learns, a kill changes nothing, and it scores an RL run with equal scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hpcrl.data.dialogue_tokens import dialogue_tokens
from hpcrl.data.tasks import make_task
from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NUM_STEPS = 40
LINES = f"""
+experiment=reward_model_tiny layout=single layout.trainer.num_ranks=null max_steps={NUM_STEPS} eval_every=20
save_every=10 rm.batch_size=16 deterministic=true trackers=[] timeline.enabled=false trainer.lr_warmup_steps=5
"""
RL = """
data.train=task:add eval_every=0 save_every=0 rollout.num_prompts=4 rollout.group_size=4 rollout.max_new_tokens=8
data.max_prompt_tokens=48 trackers=[] max_steps=1 layout=single deterministic=true
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Sums, and wrong answers that are larger than any sum."""
    for split, count in (("train", 256), ("val", 32)):
        task = make_task("task:add", {"max_digits": 1}, count, 0, split)  # type: ignore[arg-type]
        rows = [task.row(index) for index in range(count)]
        pairs = [
            {"prompt": row["prompt"], "chosen": row["answer"], "rejected": str(int(row["answer"]) + 20 + index % 60)}
            for index, row in enumerate(rows)
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return [*LINES.split(), f"data.train={tmp_path}/train.jsonl", f"data.val={tmp_path}/val.jsonl"]


def metrics(run: Path) -> list[dict[str, Any]]:
    """What was learned and held out in each step."""
    return [
        {name: row[name] for name in row if name.startswith(("rm/", "val/", "actor/", "rows/"))}
        for row in read_metrics(run)
    ]


def test_it_learns_resumes_and_scores_an_rl_run(tmp_path: Path, words: list[str]) -> None:
    whole = Start(tmp_path / "whole", words)
    assert whole.wait(200.0) == ExitCode.DONE, whole.text
    steps = metrics(tmp_path / "whole")
    assert len(steps) == NUM_STEPS + 1
    assert [step["val/accuracy"] for step in (steps[0], steps[-1])] == [0.0, pytest.approx(1.0, abs=0.1)]
    assert steps[-1]["val/margin"] > 1 and steps[-1]["val/rows_skipped"] == 0 and "val/accuracy" not in steps[1]
    assert steps[-1]["rm/min_reward"] < steps[-1]["rm/mean_reward"] < steps[-1]["rm/max_reward"]

    killed = Start(tmp_path / "killed", words)
    killed.wait_until(lambda: killed.step >= 15)
    killed.kill()
    again = Start(tmp_path / "killed", words)
    assert again.wait(200.0) == ExitCode.DONE, again.text
    assert metrics(tmp_path / "killed") == steps

    folder = tmp_path / "killed" / "hf"
    asked = ["+reward.default.name=reward_model", "+reward.default.timeout_s=600", f"reward_model.path={folder}"]
    scored = Start(tmp_path / "rl", [*RL.split(), *asked])
    assert scored.wait(200.0) == ExitCode.DONE, scored.text
    read = RolloutReader(tmp_path / "rl").read(1)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = [
            model(torch.tensor([dialogue_tokens(tokenizer, read.messages(row))])).logits.item() for row in range(16)
        ]
    assert read.batch.rewards.tolist() == pytest.approx(logits, abs=1e-5) and len(set(logits)) > 1
