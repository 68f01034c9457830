"""The Python examples of docs/algorithms.md run unchanged, and compute what their docstrings state."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.algorithms.interface import Outputs
from hpcrl.algorithms.spec import Reinforce
from hpcrl.rollout.batch import Norms
from tests.algorithms.test_algorithms import make_batch

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        exec(block, names)
    return names


def test_the_documented_advantage_estimator_works(written: dict[str, Any]) -> None:
    batch, table = make_batch([[0, 1, 1], [0, 1], [0, 1], [0, 1], [0, 1]], [1.0, 0.0, 0.0, 4.0, 2.0], [3, 3, 3, 8, 8])
    written["RankAdvantage"](Reinforce()).assign(batch, table, lambda tensor: tensor)
    assert batch.advantages.tolist() == [0, 1, 1, 0, -0.5, 0, -0.5, 0, 1, 0, -1]


def test_the_documented_objective_works(written: dict[str, Any]) -> None:
    objective = written["Vanilla"](Reinforce(entropy_loss_coef=0.5), 0.7)
    assert objective.temperature == 0.7 and objective.optimizer_steps == 1
    batch, _ = make_batch([[0, 1, 1], [0, 1]], [0.0, 0.0], [0, 1])
    batch.advantages, batch.weights = torch.tensor([0.0, 2.0, 2.0, 0.0, -1.0]), torch.tensor([1.0, 0.5])
    logprobs = torch.tensor([0.0, -1.0, -2.0, 0.0, -4.0], requires_grad=True)
    entropy = torch.tensor([0.0, 1.0, 3.0, 0.0, 2.0])
    norms = Norms(2.5, 1.5)
    loss, stats = objective.loss(Outputs(logprobs, entropy), batch, norms)
    loss.backward()
    # -(1 (-2 + .5) + 1 (-4 + 1.5) + .5 (4 + 1)) / 2.5
    assert loss.item() == pytest.approx(0.6)
    assert stats["actor/total_loss"][:2] == pytest.approx((1.5, 2.5))
    assert logprobs.grad.tolist() == pytest.approx([0, -0.8, -0.8, 0, 0.2])
