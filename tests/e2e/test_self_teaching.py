"""The policy as its own teacher in whole runs: log-probs of the teacher's sequences match transformers, before and
after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.batch import Batch
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start
from tests.e2e.test_parity import LOGPROBS
from tests.e2e.test_reference import logprobs

pytestmark = [pytest.mark.slow, pytest.mark.numerics, pytest.mark.timeout(400)]

WORDS = """
pipeline=distill data.max_prompt_tokens=48 rollout.max_new_tokens=4 rollout.num_prompts=4 rollout.group_size=2
rollout.temperature=0.8 trainer.lr=1e-2 generator.max_num_seqs=8 save_every=1 layout=single trackers=[]
""".split()  # noqa: SIM905
CONTEXT = "teacher.context='{prompt} is {answer}'"


def check(run: Path, step: int, teacher: Path, data: Path, tokenizer: Any) -> None:
    """The stored values of a step's rollouts are those of the model in `teacher` on its own prompts."""
    answers = {row["prompt"]: row["answer"] for row in map(json.loads, data.read_text().splitlines())}
    batch = RolloutReader(run).batch(step)
    for row in range(batch.num_sequences):
        only: Batch = batch.select([row])
        written = only.turn_ids >= 0
        asked = tokenizer.decode(only.token_ids[~written])
        prompt = asked.partition("user\n")[2].partition("<|im_end|>")[0]
        read = asked.replace(prompt, f"{prompt} is {answers[prompt]}")
        ids = torch.tensor(tokenizer(read, add_special_tokens=False)["input_ids"])
        sequence = torch.cat([ids, only.token_ids[written].long()])
        wanted = logprobs(teacher, sequence, torch.tensor([0, len(sequence)]), 0.8)[len(ids) :]
        assert torch.allclose(only.teacher_logprobs[written], wanted, rtol=0, atol=LOGPROBS)
        assert not only.teacher_logprobs[~written].any()


def test_a_copy_is_updated_and_a_resumed_run_loads_it(tmp_path: Path, digit_model: Path, digit_data: Path) -> None:
    run, tokenizer = tmp_path / "run", AutoTokenizer.from_pretrained(digit_model)
    words = [f"model.path={digit_model}", f"data.train={digit_data}", *WORDS, CONTEXT]
    words += ["teacher.source=policy", "teacher.sync_every=2"]
    start = Start(run, [*words, "max_steps=3"])
    assert start.wait(100) == ExitCode.DONE, start.text
    copy = run / "teacher" / "step_000002"
    check(run, 2, digit_model, digit_data, tokenizer)
    check(run, 3, copy, digit_data, tokenizer)
    start = Start(run, [*words, "max_steps=5"])
    assert start.wait(100) == ExitCode.DONE, start.text
    check(run, 4, copy, digit_data, tokenizer)
    check(run, 5, run / "teacher" / "step_000004", digit_data, tokenizer)
    rows = read_metrics(run)
    assert [row["step"] for row in rows if "time/teacher_update" in row] == [2, 4]


def test_the_base_of_adapters_reads_the_answer(tmp_path: Path, digit_model: Path, digit_data: Path) -> None:
    run, tokenizer = tmp_path / "run", AutoTokenizer.from_pretrained(digit_model)
    words = [f"model.path={digit_model}", f"data.train={digit_data}", *WORDS, CONTEXT]
    words += ["teacher.source=base", "trainer.lora.rank=4", "max_steps=2", "save_every=0"]
    start = Start(run, words)
    assert start.wait(100) == ExitCode.DONE, start.text
    check(run, 2, digit_model, digit_data, tokenizer)
