"""Runs that generate with the real SGLang on a CPU (tests/sglang_cpu)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.metrics.log import read_metrics
from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT
from tests.contracts.gen.sglang import ENVIRONMENT
from tests.e2e.program import Start
from tests.e2e.test_vllm import ALL, APART, LAYOUTS

pytestmark = [pytest.mark.outside, pytest.mark.slow, pytest.mark.timeout(600)]

SGLANG = """
generator.engine=sglang generator.sglang.kv_cache_gib=0.002 rollout.top_k=50
+generator.sglang.options={device:cpu,attention_backend:torch_native}
""".split()  # noqa: SIM905
WORDS = {"apart": [*APART, "layout.generator.num_ranks=1"], "colocated_split": LAYOUTS["colocated_split"]}
CORES = {"apart": "0", "colocated_split": "0|1"}
"""Those of each of SGLang's schedulers."""


@pytest.mark.parametrize("layout", WORDS)
def test_a_run_trains_on_sglang_rollouts(layout: str, tmp_path: Path, digit_model: Path, digit_data: Path) -> None:
    pytest.importorskip("sglang", reason="SGLang is not installed; make test-outside")
    inputs = [f"model.path={digit_model}", f"data.train={digit_data}", f"data.val={digit_data}"]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "SGLANG_CPU_OMP_THREADS_BIND": CORES[layout]}
    start = Start(tmp_path / "run", [*inputs, *ALL, *WORDS[layout], *SGLANG], environment)
    assert start.wait(500.0) == ExitCode.DONE, start.text
    assert "sglang 0.5.23" in start.text
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 4
    for row in rows[1:]:
        assert row["mismatch/diff/mean"] < 1e-4, "the trainer has the log-probs of what was generated"
    assert len({row["critic/score/mean"] for row in rows[1:]}) > 1
