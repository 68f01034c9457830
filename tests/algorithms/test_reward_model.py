"""Objectives of reward models: against TRL's RewardTrainer, numbers by hand, and under any split."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.algorithms.scalar_objective import make
from hpcrl.config.head_training import HeadTrainingConfig
from hpcrl.metrics.stats import Stats, flatten, merge
from hpcrl.rollout.batch import Batch, Norms, pack
from tests.algorithms.trl_reward_model import GOLDENS
from tests.conftest import ROOT

TRL = ROOT / ".venv-trl" / "bin" / "python"


def make_batch(targets: list[list[float]], chosen: list[bool] | None = None) -> Batch:
    """A row for each list, with a trained token for each target after two others."""
    lengths = [len(row) + 2 for row in targets]
    mask = torch.tensor([place >= 2 for length in lengths for place in range(length)])
    zeros = torch.zeros(len(mask))
    columns = {"token_ids": zeros.int().numpy(), "loss_mask": mask.numpy(), "gen_logprobs": zeros.numpy()}
    columns |= {"versions": zeros.int().numpy() - 1, "turn_ids": mask.int().numpy() - 1}
    batch = pack(range(len(targets)), lengths, columns)
    batch.targets = zeros.masked_scatter(mask, torch.tensor([number for row in targets for number in row]))
    batch.chosen = None if chosen is None else torch.tensor(chosen)
    return batch


def computed(objective: Objective, batch: Batch, values: list[float], norms: Norms) -> tuple[float, list[float], Stats]:
    """(loss, gradient of the values, statistics). Values outside the mask must not matter."""
    given = torch.tensor(values, requires_grad=True)
    everywhere = torch.full((batch.num_tokens,), 7.0).masked_scatter(batch.loss_mask, given)
    loss, stats = objective.loss(Outputs(torch.zeros_like(everywhere), values=everywhere), batch, norms)
    loss.backward()
    assert isinstance(given.grad, Tensor)
    return loss.item(), given.grad.tolist(), stats


@pytest.mark.parametrize("number", range(4))
def test_pairs_match_trl(number: int) -> None:
    case: dict[str, Any] = json.loads(GOLDENS.read_text())["cases"][number]
    count = len(case["chosen"])
    margins = case["margin"] or [0.0] * count
    values = [reward for pair in zip(case["chosen"], case["rejected"], strict=True) for reward in pair]
    batch = make_batch([[margin] for margin in margins for _ in range(2)], [True, False] * count)
    objective = make(HeadTrainingConfig(center_coef=case["coef"] or 0.0))
    norms = Norms(2.0 * count, 2.0 * count)
    loss, gradient, stats = computed(objective, batch, values, norms)
    assert loss == pytest.approx(case["loss"], rel=1e-6)
    assert gradient[::2] + gradient[1::2] == pytest.approx(case["gradient"], rel=1e-5, abs=1e-9)
    found = flatten(stats)
    assert {name: found[f"rm/{name}"] for name in case["metrics"]} == pytest.approx(case["metrics"], rel=1e-6)
    assert found["rm/loss"] == pytest.approx(loss) and len(found) == len(case["metrics"]) + 1

    parts = [computed(objective, batch.select(rows), [values[row] for row in rows], norms) for rows in ([0, 1], [])]
    rest = list(range(2, 2 * count))
    parts.append(computed(objective, batch.select(rest), values[2:], norms))
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-6)
    assert parts[0][1] + parts[2][1] == pytest.approx(gradient, rel=1e-6)
    assert flatten(merge(part[2] for part in parts)) == pytest.approx(found, rel=1e-6)


@pytest.mark.skipif(not TRL.exists(), reason="no .venv-trl (tests/bench/trl/setup.sh)")
@pytest.mark.soak
@pytest.mark.timeout(120)
def test_goldens_are_what_trl_computes(tmp_path: Path) -> None:
    script = GOLDENS.with_suffix(".py")
    subprocess.run([TRL, script, tmp_path / "new.json"], check=True, cwd=ROOT, capture_output=True, timeout=100)
    new, old = (json.loads(path.read_text()) for path in (tmp_path / "new.json", GOLDENS))
    for one, other in zip(new["cases"], old["cases"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"]) and one["gradient"] == pytest.approx(other["gradient"])


def test_rows_that_are_no_pairs_are_refused() -> None:
    objective, norms = make(HeadTrainingConfig()), Norms(2, 2)
    for chosen in (None, [False, True]):
        with pytest.raises(ValueError, match="are not pairs of a chosen and a rejected answer"):
            computed(objective, make_batch([[0.0], [0.0]], chosen), [1.0, 2.0], norms)
    with pytest.raises(ValueError, match=r"batch\.targets must be filled"):
        batch = make_batch([[0.0], [0.0]], [True, False])
        batch.targets = None
        computed(objective, batch, [1.0, 2.0], norms)


def test_scores_have_the_mean_squared_error() -> None:
    objective, batch = make(HeadTrainingConfig(rows="scores")), make_batch([[1.0], [-2.0], [0.5]])
    loss, gradient, stats = computed(objective, batch, [3.0, -2.0, 0.0], Norms(3, 3))
    assert loss == pytest.approx((4 + 0 + 0.25) / 3) and gradient == pytest.approx([4 / 3, 0, -1 / 3])
    assert flatten(stats) == pytest.approx(
        {"rm/loss": 4.25 / 3, "rm/error": 2.5 / 3, "rm/mean_reward": 1 / 3, "rm/max_reward": 3, "rm/min_reward": -2}
    )


def test_several_scores_have_the_mean_squared_error_over_answers_and_heads() -> None:
    objective = make(HeadTrainingConfig(rows="scores", heads=["helpful", "short"]))
    batch = make_batch([[0.0], [0.0], [0.0]])
    scores, values = (
        torch.tensor([[1.0, 4.0], [-2.0, 0.0], [0.5, 1.0]]),
        torch.tensor([[3.0, 4.0], [-2.0, 1.0], [0, 0]]),
    )

    def of(rows: list[int]) -> tuple[float, dict[str, float]]:
        part = batch.select(rows)
        part.targets, given = torch.zeros(part.num_tokens, 2), torch.full((part.num_tokens, 2), 7.0)
        part.targets[part.loss_mask], given[part.loss_mask] = scores[rows], values[rows]
        part.check_shapes()
        loss, stats = objective.loss(Outputs(torch.zeros(part.num_tokens), values=given), part, Norms(3, 3))
        return loss.item(), flatten(stats)

    loss, stats = of([0, 1, 2])
    assert [loss, stats["rm/loss"]] == pytest.approx([(4 + 1 + 0.25 + 1) / 6] * 2)
    assert stats["rm/error/helpful"] == pytest.approx(2.5 / 3) and stats["rm/error/short"] == pytest.approx(2 / 3)
    assert stats["rm/error"] == pytest.approx(4.5 / 6)
    assert of([0])[0] + of([2, 1])[0] == pytest.approx(loss)


def test_labels_of_steps_have_the_cross_entropy_of_all_steps() -> None:
    objective, batch = make(HeadTrainingConfig(rows="steps")), make_batch([[1.0, 0.0], [1.0]])
    values, norms = [2.0, 1.0, -1.0], Norms(3, 2)
    expected = [math.log1p(math.exp(x)) for x in (-2.0, 1.0, 1.0)]
    loss, gradient, stats = computed(objective, batch, values, norms)
    sigmoid = [1 / (1 + math.exp(-x)) for x in values]
    assert loss == pytest.approx(sum(expected) / 3)
    assert gradient == pytest.approx([(p - y) / 3 for p, y in zip(sigmoid, (1, 0, 1), strict=True)])
    assert flatten(stats)["rm/accuracy"] == pytest.approx(1 / 3)
    first = computed(objective, batch.select([1]), values[2:], norms)[0]
    assert first + computed(objective, batch.select([0]), values[:2], norms)[0] == pytest.approx(loss)
