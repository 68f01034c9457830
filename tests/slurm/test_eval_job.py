"""An evaluation alone as a real job, requeued on the way."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hpcrl.launch.evaluation import main
from hpcrl.metrics.responses import count_responses, read_responses, responses_file
from tests import in_process
from tests.conftest import ROOT
from tests.slurm.jobs import COMPLETED, log, says, wait_state, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
COUNT = 400


def test_a_requeued_evaluation_keeps_its_responses(
    cluster: Any,
    tmp_path: Path,
    digit_model: Path,
) -> None:
    words = [str(digit_model), "data.val=task:sort_digits", f"eval.num_prompts={COUNT}", "rollout.max_new_tokens=16"]
    words += ["data.max_prompt_tokens=64", "generator.max_num_seqs=1", "+cluster=slurm", "cluster.time=00:30:00"]
    environ = {**cluster.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = in_process.run(main, *words, at=tmp_path, environ=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    submitted, run = re.search(r"^job (\d+) is submitted$", done.stdout, re.MULTILINE), tmp_path / "runs/digits_eval"
    assert submitted is not None, done.stdout
    job = int(submitted[1])
    wait_until(lambda: count_responses(run) >= 20, lambda: log(run))
    says(cluster, run, "state    running", "responses are stored")
    cluster.run("scontrol", "requeue", str(job))
    kept = count_responses(run)
    wait_state(cluster, run, job, [COMPLETED])
    assert "prompts have their responses from an earlier attempt" in log(run) and 20 <= kept < COUNT
    assert "prompts  samples  score" in log(run) and f"{COUNT} responses are stored" in says(cluster, run, "finished")
    _, rows = read_responses(responses_file(run, 0))
    assert [row["row"] for row in rows] == list(range(COUNT))
