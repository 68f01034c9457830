"""The divergence over the whole vocabulary, and over a top-k of all words, equals TRL's GKD loss."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.algorithms.interface import TeacherHead
from hpcrl.engines.train.fsdp2.logits import Head
from hpcrl.engines.train.fsdp2.taught import TaughtStates, TaughtTopK
from hpcrl.engines.train.fsdp2.token_divergence import token_divergence
from hpcrl.spec.divergence import Divergence

pytestmark = pytest.mark.numerics

GOLDENS = Path(__file__).parent / "goldens"
FILE = GOLDENS / "trl_divergences.json"
CASES: list[dict[str, Any]] = json.loads(FILE.read_text())["cases"]
TRL_PYTHON = Path(__file__).resolve().parents[2] / ".venv-trl" / "bin" / "python"


@pytest.mark.parametrize("form", ["full", "top_k"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"beta {case['beta']}, temperature {case['temperature']}")
def test_value_and_gradient_equal_trls(case: dict[str, Any], form: str) -> None:
    given = {name: torch.tensor(value) for name, value in case.items()}
    states, matrix = given["states"].requires_grad_(), given["matrix"].requires_grad_()
    asked = Divergence(form, case["beta"], len(matrix), case["temperature"])  # type: ignore[arg-type]
    taught: TaughtStates | TaughtTopK = TaughtStates(
        asked, given["teacher_states"], TeacherHead(given["teacher_matrix"])
    )
    if form == "top_k":
        logits = given["teacher_states"] @ given["teacher_matrix"].T
        best = (logits / case["temperature"]).log_softmax(-1).topk(len(matrix))
        taught = TaughtTopK(asked, best.indices, best.values)
    values = token_divergence(states, matrix, None, taught, head=Head(), chunk_tokens=3)
    torch.testing.assert_close(values, given["losses"], rtol=1e-5, atol=1e-6)
    (values * given["weights"]).sum().backward()
    torch.testing.assert_close(states.grad, given["states_gradient"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(matrix.grad, given["matrix_gradient"], rtol=1e-4, atol=1e-5)


@pytest.mark.soak  # where everything is required, there is no .venv-trl
def test_the_goldens_are_what_trl_computes(tmp_path: Path) -> None:
    if not TRL_PYTHON.exists():
        pytest.skip("no .venv-trl: run tests/bench/trl/setup.sh")
    new = tmp_path / "new.json"
    subprocess.run([TRL_PYTHON, GOLDENS / "write_trl_divergences.py", new], check=True, timeout=100)
    for got, want in zip(json.loads(new.read_text())["cases"], CASES, strict=True):
        assert got.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(torch.tensor(got[name]), torch.tensor(value), rtol=1e-5, atol=1e-6)
