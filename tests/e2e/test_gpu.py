"""A whole run on CUDA; the same commands as on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_generator_and_trainer_log_probs_agree_on_one_gpu(tmp_path: Path) -> None:
    words = [f"run_dir={tmp_path / 'run'}", "layout=single", "max_steps=2", "eval_every=0", "rollout.filter_std=false"]
    words += ["algorithm.kl_loss_coef=0.01", "rollout.top_p=0.9", "rollout.temperature=0.8", "cluster.device=cuda"]
    done = subprocess.run(
        [sys.executable, "-m", "hpcrl.launch", "+experiment=demo", *words],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1, 2]
    batch = RolloutReader(tmp_path / "run").batch(2)
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    # fp32 kernels of generator and trainer sum in another order; TF32 is off by default.
    assert (batch.old_logprobs - batch.gen_logprobs)[batch.loss_mask].abs().max() < 1e-3
