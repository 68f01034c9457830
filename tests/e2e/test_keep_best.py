"""A run keeps the checkpoint with the best validation, also when it is killed while it saves that checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.checkpoint.best import BEST, best_of, read_best
from hpcrl.convert.__main__ import main as convert
from hpcrl.metrics.log import read_metrics
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import steps_in
from tests.e2e.program import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

METRIC = "val/response_length/mean"
WORDS = f"""
pipeline=sft layout=single max_steps=4 sft.batch_size=2 trainer.lr=3e-2 data.train=task:sort_digits
data.val=task:sort_digits eval_every=1 eval.num_prompts=4 eval.temperature=1 rollout.temperature=1
rollout.max_new_tokens=24 save_every=3 keep_best.metric={METRIC}
""".split()


def test_the_best_step_is_kept_through_a_kill_and_exported(tmp_path: Path) -> None:
    run, root = tmp_path / "run", tmp_path / "run/checkpoints"
    killed = Start(run, WORDS, {"HPCRL_FAILPOINT": "latest_replaced"})  # the first best, before BEST names it
    assert killed.wait() == ExitCode.RANK_KILLED, killed.text
    assert steps_in(root) == [1] and not (root / BEST).exists()
    resumed = Start(run, WORDS)
    assert resumed.wait() == ExitCode.DONE, resumed.text
    expected = best_of(read_metrics(run), METRIC, "max", range(5))
    assert expected is not None and expected.step in steps_in(root)
    assert read_best(root) == expected
    assert steps_in(root)[-1] == 4
    assert f"best step {expected.step}, {METRIC}" in resumed.text
    assert convert(["--checkpoint", str(run), "--step", "best", "--output", str(tmp_path / "best")]) == 0
    assert convert(["--checkpoint", str(run), "--step", str(expected.step), "--output", str(tmp_path / "same")]) == 0
    best, same, final = (weights(tmp_path / at) for at in ("best", "same", "run/hf"))
    assert torch.equal(best, same)
    assert torch.equal(best, final) == (expected.step == 4)


def weights(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
