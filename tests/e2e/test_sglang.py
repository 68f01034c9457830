"""A run that generates with the stand-in of SGLang (tests/sglang_standin): one of the replica's two ranks owns it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.exitcodes import ExitCode
from hpcrl.metrics.log import read_metrics
from tests.conftest import ROOT
from tests.contracts.gen.sglang import STANDIN
from tests.e2e.program import Start
from tests.e2e.test_vllm import ALL, LAYOUTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_run_trains_on_what_the_first_rank_of_a_replica_generates(
    tmp_path: Path, digit_model: Path, digit_data: Path
) -> None:
    inputs = [f"model.path={digit_model}", f"data.train={digit_data}", f"data.val={digit_data}"]
    words = [*inputs, *ALL, *LAYOUTS["apart_split"], "generator.engine=sglang", "rollout.top_k=50"]
    start = Start(tmp_path / "run", words, {"PYTHONPATH": f"{ROOT}:{STANDIN}"})
    assert start.wait(300.0) == ExitCode.DONE, start.text
    assert "sglang 0.5.23" in start.text
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 4
    for row in rows[1:]:
        assert row["mismatch/diff/mean"] < 1e-4, "the trainer has the log-probs of what was generated"
    assert len({row["critic/score/mean"] for row in rows[1:]}) > 1
