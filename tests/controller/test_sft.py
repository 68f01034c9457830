"""How a supervised run ends when it reaches its stop score."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.run_folder import read_finished
from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT


@pytest.mark.slow
def test_a_run_that_reaches_its_stop_score_reports_it(tmp_path: Path) -> None:
    words = ["+experiment=demo_sft", "layout=single", "max_steps=5", "eval_every=1", "sft.stop_score=0"]
    words += ["eval.num_prompts=2", "sft.batch_size=2", f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-m", "hpcrl.launch", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == ExitCode.DONE, done.stderr
    (score,) = {
        row.get("val/sampled/score/mean", row.get("val/score/mean"))
        for row in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        if row["step"] == 1
    }
    why = f"trained 1 step: the validation score, {score:.3f}, has reached sft.stop_score=0"
    assert why in done.stdout.splitlines() and read_finished(tmp_path / "run")["reason"] == why
