"""Models served by ranks of the run: judges, one of which is killed, and a reward model."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from hpcrl.data.chat import encode, render
from hpcrl.metrics.log import read_metrics
from hpcrl.rewards.builtin.judge_prompt import NONE, harmless
from hpcrl.rewards.grading.extract import after_thinking
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import committed_step
from tests.conftest import ROOT
from tests.e2e.program import Start
from tests.echo_judge import make_echo_judge
from tests.engines.test_scalar import make_reward_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LINES = """
data.train=task:sort_digits eval_every=0 save_every=0 rollout.num_prompts=4 rollout.group_size=4
rollout.max_new_tokens=12 data.max_prompt_tokens=48 trackers=[] algorithm.num_mini_batches=1 timeouts.command_s=120
layout.trainer.num_ranks=1
"""
WORDS = LINES.split()


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = make_echo_judge(tmp_path_factory.mktemp("model") / "echo")
    options = "{judges: {own: {role: judge}}, request_timeout_s: 60, backoff_s: 0.1}"
    return [
        f"+reward.default={{name: judge, timeout_s: 600, options: {options}}}",
        *(f"judge.path={folder}", "judge.max_prompt_tokens=200", "judge.max_new_tokens=24"),
    ]


def start(run_dir: Path, *words: str) -> Start:
    return Start(run_dir, [*WORDS, *words], {"PYTHONPATH": str(ROOT)})


def test_a_run_continues_without_one_judge_and_resumes_after_losing_the_last(tmp_path: Path, judge: list[str]) -> None:
    run_dir = tmp_path / "run"
    words = [*judge, "layout.judge.num_ranks=2", "save_every=1"]
    run = start(run_dir, *words, "max_steps=100000")
    run.wait_until(lambda: run.step >= 2, 300.0)
    os.kill(run.ranks[2], signal.SIGKILL)
    run.wait_until(lambda: "the run continues without it" in run.text, 200.0)
    before = run.step
    run.wait_until(lambda: run.step >= before + 3, 200.0)
    os.kill(run.ranks[3], signal.SIGKILL)
    assert run.wait() == ExitCode.RANK_KILLED
    # On a busy machine the deadline of a command may come before the agent's report of the kill.
    cause = r"(.*SIGKILL|it did not answer in time)"
    assert re.search(rf"hpcrl: rank 2 \(judge\) on \S+ is lost: {cause}.*; the run continues without it", run.text)
    assert re.search(r"hpcrl: rank 3 \(judge\) on \S+ is lost: .*SIGKILL", run.errors.read_text()), run.text
    rows = [row for row in read_metrics(run_dir) if row["step"] > 0]
    assert all(row["scheduler/score_errors"] == 0 for row in rows), "what the lost judge was asked, the other was"
    assert all(row["env/sort_digits/unparsable"] == 0 for row in rows)
    assert all(0 < row["judge/busy"] <= 1 and 0 < row["judge/slots_used"] <= 1 for row in rows)
    batch = RolloutReader(run_dir, provisional=True).read(1)
    responses = [batch.messages(row)[-1]["content"] for row in range(len(batch.batch.rewards))]
    seen = [harmless(after_thinking(text), 20_000) or NONE for text in responses]
    assert batch.batch.rewards.tolist() == pytest.approx([len(text) % 10 / 10 for text in seen])
    assert len(set(batch.batch.rewards.tolist())) > 1

    done = committed_step(run_dir)
    again = start(run_dir, *words, f"max_steps={done + 2}")
    assert again.wait(280.0) == ExitCode.DONE, again.text
    rows = [row for row in read_metrics(run_dir) if row["step"] > done]
    assert [row["step"] for row in rows] == [done + 1, done + 2], "the run goes on where it was saved, with both judges"
    assert all(row["scheduler/score_errors"] == 0 and row["judge/answered"] > 0 for row in rows)


def test_a_reward_model_can_share_a_rank_with_another_role(tmp_path: Path) -> None:
    """A repeated deterministic run gives the same rewards."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = make_reward_model(tmp_path / "model")
    words = ["+reward.default={name: reward_model, timeout_s: 600, options: {scale: 3.0}}", "max_steps=2"]
    words += [f"reward_model.path={folder}", "reward_model.max_tokens=128", "deterministic=true"]
    rewards = {}
    for name in ("alone", "again"):
        run = start(tmp_path / name, *words, "layout=single", "layout.trainer.num_ranks=null")
        assert run.wait(280.0) == ExitCode.DONE, run.text
        rewards[name] = [RolloutReader(tmp_path / name).batch(step).rewards.tolist() for step in (1, 2)]
    assert rewards["alone"] == rewards["again"]
    read = RolloutReader(tmp_path / "alone").read(1)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for row, reward in enumerate(rewards["alone"][0]):
        ids = encode(tokenizer, render(tokenizer, read.messages(row), None, ask=False))
        with torch.no_grad():
            logit = model(torch.tensor([ids])).logits.item()
        assert reward == pytest.approx(3 * logit, abs=3e-5)
    last = read_metrics(tmp_path / "alone")[-1]
    assert last["reward_model/answered"] == 16 and last["env/sort_digits/retries"] == 0
