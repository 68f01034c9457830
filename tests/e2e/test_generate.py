"""Generation of rows as whole runs: a kill changes nothing, and supervised training reads the rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hpcrl.config import load
from hpcrl.data.answers import sft_rows
from hpcrl.metrics.generated import count_done, work_file
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = ["layout=single", "data.max_prompt_tokens=32", "cluster.device=cpu"]


def test_a_killed_generation_ends_with_the_same_rows_which_sft_reads(
    tmp_path: Path, digit_model: Path, digit_data: Path
) -> None:
    """SIGKILL with a torn last line; 16 parts of 4 prompts, in environments of two turns."""
    words = ["pipeline=generate", f"model.path={digit_model}", f"data.train={digit_data}", *SMALL]
    words += ["rollout.max_new_tokens=3", "generator.max_num_seqs=4", "generate.samples=4", "generate.min_score=0.5"]
    words += ["env.default.name=scripted", "env.default.add_reward=true", "reward.default.name=exact_match"]
    whole = Start(tmp_path / "a", [*words, f"generate.target={tmp_path / 'a.jsonl'}"])
    assert whole.wait() == ExitCode.DONE, whole.text
    assert "64 of 64 prompts" in whole.text and "dropped" in whole.text
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_bytes().splitlines()]
    assert 0 < len(rows) < 4 * 64 and {row["tag"] for row in rows} == {"default"}
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant", "user", "assistant"]
        assert row["score"] >= 0.5 and "weight" not in row["messages"][1]

    target, run = tmp_path / "b.jsonl", tmp_path / "b"
    start = Start(run, [*words, f"generate.target={target}"])
    start.wait_until(lambda: count_done(run) >= 8)
    start.kill()
    kept = count_done(run)
    assert 8 <= kept < 64 and not target.exists(), start.text
    with work_file(run).open("r+b") as file:
        file.truncate(work_file(run).stat().st_size - 9)
    last = Start(run, [*words, f"generate.target={target}"])
    assert last.wait() == ExitCode.DONE, last.text
    assert f"{kept - 1} of 64 prompts have their rows from an earlier attempt" in last.text
    assert target.read_bytes() == (tmp_path / "a.jsonl").read_bytes()
    told = [json.loads((folder / "generation.json").read_bytes())["counts"] for folder in (tmp_path / "a", run)]
    assert told[0] == told[1] and told[0]["rows"] == len(rows)

    data = load(["pipeline=sft", f"data.train={target}", "data.max_prompt_tokens=32"]).data
    tokenizer = AutoTokenizer.from_pretrained(digit_model)
    trained = sft_rows(data, "train", tokenizer)
    (sequence,) = trained.sequences(0)
    text = tokenizer.decode([token for token, own in zip(sequence.token_ids, sequence.loss_mask, strict=True) if own])
    answers = [message["content"] for message in rows[0]["messages"] if message["role"] == "assistant"]
    assert len(answers) == 2 and all(answer in text for answer in answers)
