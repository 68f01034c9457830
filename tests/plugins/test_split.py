"""An engine that splits a model over two ranks, and replicas of two ranks, under the real control plane: the numbers
match engines on one rank, over kills and on another number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.batch import Batch
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT
from tests.e2e.program import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
WORDS = """
trainer.engine=hpcrl_example.specs:STAGES generator.engine=hpcrl_example.specs:COLUMNS trainer.lr=0.1
reward.default.name=hpcrl_example.specs:VOWELS algorithm.num_mini_batches=2 algorithm.kl_loss_coef=0.1
rollout.num_prompts=4 rollout.group_size=4 rollout.max_new_tokens=8 save_every=1 deterministic=true
""".split()  # noqa: SIM905
WHOLE = ["layout=single"]
SPLIT = """
trainer.own.num=2 layout.trainer.num_ranks=4 layout.reference.num_ranks=2 layout.reference.colocate_with=null
layout.generator.tensor_parallel=2
""".split()  # noqa: SIM905
STEPS = 4


def start(run_dir: Path, *words: str, max_steps: int = STEPS) -> Start:
    return Start(run_dir, [*WORDS, *words, f"max_steps={max_steps}"], PATHS)


def left(run_dir: Path) -> tuple[list[Batch], list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Rollouts and metrics of all steps, and the policy at the end."""
    rows = [
        {name: value for name, value in row.items() if not name.startswith(("time/", "system/", "scheduler/"))}
        for row in read_metrics(run_dir)
    ]
    files = sorted((run_dir / "hf").glob("model-*.safetensors"))
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return [RolloutReader(run_dir).batch(step) for step in range(1, STEPS + 1)], rows, weights


def test_a_model_split_over_two_ranks_resumes_and_matches_the_unsplit_one(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", *WHOLE)
    assert whole.wait() == 0, whole.text
    assert start(tmp_path / "split", *WHOLE, max_steps=1).wait() == 0
    killed = start(tmp_path / "split", *SPLIT)
    killed.wait_until(lambda: killed.step >= 2)
    os.kill(killed.ranks[2], 9)  # the second stage of the first copy, which holds outputs and gets no rows
    assert killed.wait() == ExitCode.RANK_KILLED, killed.text
    again = start(tmp_path / "split", *SPLIT)
    assert again.wait() == 0, again.text
    assert "ranks that share the rows of trainer" in killed.text, "which changes bits in general"
    ours, theirs = left(tmp_path / "split"), left(tmp_path / "whole")
    for step, (batch, other) in enumerate(zip(ours[0], theirs[0], strict=True), 1):
        assert batch.columns.keys() == other.columns.keys() and batch.num_sequences == 16
        assert {"old_logprobs", "ref_logprobs", "advantages"} <= batch.columns.keys()
        for name, values in batch.columns.items():
            torch.testing.assert_close(values, other.columns[name], rtol=1e-6, atol=1e-9, msg=f"{step} {name}")
    assert [row["step"] for row in ours[1]] == list(range(STEPS + 1))
    for row, other_row in zip(ours[1], theirs[1], strict=True):
        # A loss is a mean of terms of order 1 that nearly cancel.
        assert row == pytest.approx(other_row, rel=1e-5, abs=1e-7), row["step"]
    assert ours[2].keys() == theirs[2].keys() == {"A", "B"}
    for name, weight in ours[2].items():
        torch.testing.assert_close(weight, theirs[2][name], rtol=1e-9, atol=1e-9)
