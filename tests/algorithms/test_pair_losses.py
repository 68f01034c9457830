"""Losses on pairs: values, gradients and metrics equal TRL's own (goldens/make_dpo.py), however rows are divided."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcrl.algorithms.interface import Outputs
from hpcrl.algorithms.pairs.kto import kto
from hpcrl.algorithms.pairs.objective import CHOSEN_TOKENS, KL, LOG_RATIO, PairObjective, make_objective
from hpcrl.algorithms.pairs.orpo import orpo
from hpcrl.algorithms.pairs.spec import DPOConfig
from hpcrl.data.answers import TrainedSequence, with_answer_of
from hpcrl.metrics.stats import Stats, flatten, merge
from hpcrl.pipelines.dpo import with_margin
from hpcrl.rollout.batch import Batch, Norms, batch_from_samples
from hpcrl.rollout.types import FinishReason, Sample
from tests.conftest import ROOT

GOLDENS = Path(__file__).parent / "goldens"
WRITTEN = json.loads((GOLDENS / "dpo.json").read_text())
POLICY, REFERENCE = (
    torch.tensor(WRITTEN[name], dtype=torch.float64).view(WRITTEN["vocab"], -1) for name in ("policy", "reference")
)
Rows = list[TrainedSequence]
SPLITS = {"whole": [[0, 1, 2, 3]], "one a micro-batch": [[0], [1], [2], [3]], "ranks": [[2, 3], [], [1], [0]]}


def sequence(prompt: list[int], answer: list[int]) -> TrainedSequence:
    return TrainedSequence(prompt + answer, [False] * len(prompt) + [True] * len(answer))


def rows_of(labelled: bool) -> tuple[Rows, list[bool], int]:
    """(sequences, whether they are good, sequences of a row)."""
    if labelled:
        return [sequence(*row[:2]) for row in WRITTEN["labelled"]], [row[2] for row in WRITTEN["labelled"]], 1
    both = [sequence(pair[0], pair[n]) for pair in WRITTEN["pairs"] for n in (1, 2)]
    return both, [True, False] * len(WRITTEN["pairs"]), 2


def batch_of(sequences: Rows, chosen: list[bool], per_row: int) -> Batch:
    samples = [
        Sample(
            id=n, finish_reason=FinishReason.STOP, token_ids=np.array(each.token_ids, np.int32),
            loss_mask=np.array(each.loss_mask), gen_logprobs=np.zeros(len(each.token_ids), np.float32),
            versions=np.full(len(each.token_ids), -1, np.int32), turn_ids=np.zeros(len(each.token_ids), np.int32) - 1,
        )
        for n, each in enumerate(sequences)
    ]  # fmt: skip
    batch = batch_from_samples(samples, [n // per_row for n in range(len(samples))])
    batch.chosen = torch.tensor(chosen)
    batch.ref_logprobs = logprobs(REFERENCE, batch)
    return batch


def logprobs(table: Tensor, batch: Batch) -> Tensor:
    """Float64 [T]: log-probs of trained tokens, 0 elsewhere; the logits after a token are its row of the table."""
    log_p = table.log_softmax(-1)[batch.token_ids.roll(1), batch.token_ids]
    return log_p * batch.loss_mask


def compute(section: dict[str, Any], parts: list[list[int]]) -> tuple[float, Tensor, Stats]:
    """(loss, its gradient for the table, statistics) of rows that are divided into these parts."""
    own = DPOConfig(**section)
    objective, table = make_objective(own), POLICY.clone().requires_grad_()
    sequences, chosen, per_row = rows_of(own.spec.labelled)
    if own.spec.labelled:
        most = max(len(each.token_ids) for each in sequences)
        mixed = [with_answer_of(each, sequences[n - 1], most + 9) for n, each in enumerate(sequences)]
        batch = batch_of(mixed, chosen, 1)
        found = objective.loss(Outputs(logprobs(table.detach(), batch)), batch, Norms(1.0, 1.0))[1][LOG_RATIO]
        objective.coefficients = {KL: max(0.0, found.total / found.count)}
    else:
        good = sum(sum(each.loss_mask) for each in sequences[::2])
        objective.coefficients = {CHOSEN_TOKENS: float(good)}
    whole = batch_of(sequences, chosen, per_row)
    norms = Norms(float(whole.loss_mask.sum()), float(len(sequences)))
    total, stats = torch.zeros((), dtype=torch.float64), []
    for part in parts:
        if part:
            batch = whole.select([row * per_row + n for row in part for n in range(per_row)])
            loss, own_stats = objective.loss(Outputs(logprobs(table, batch)), batch, norms)
            total = total + loss
            stats.append(own_stats)
    (gradient,) = torch.autograd.grad(total, table)
    return total.item(), gradient, with_margin(merge(stats))


@pytest.mark.parametrize("parts", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("case", WRITTEN["cases"], ids=lambda case: "-".join(map(str, case["section"].values())))
def test_losses_equal_trl_however_rows_are_divided(case: dict[str, Any], parts: list[list[int]]) -> None:
    loss, gradient, stats = compute(case["section"], parts)
    assert loss == pytest.approx(case["loss"], rel=1e-6)
    wanted = torch.tensor(case["gradient"], dtype=torch.float64).view_as(gradient)
    assert wanted.abs().max() > 1e-3 and (gradient - wanted).abs().max() < 1e-6
    values = flatten(stats)
    assert values["loss"] == pytest.approx(loss, rel=1e-6)
    for name, value in case["metrics"].items():
        if name == "kl":
            assert value > 0.1, "without a KL term, the case would not show it"
        elif name in values or name != "nll_loss":  # TRL shows 0 without this term
            assert values[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_all_losses_are_compared_with_trl() -> None:
    assert {case["section"]["loss"] for case in WRITTEN["cases"]} == {
        "sigmoid", "ipo", "robust", "simpo", "orpo", "cpo", "kto",
    }  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_the_goldens_are_what_trl_computes(tmp_path: Path) -> None:
    trl = ROOT / ".venv-trl" / "bin" / "python"
    if not trl.exists():
        pytest.skip("there is no .venv-trl (tests/bench/trl/setup.sh makes it)")
    subprocess.run([trl, GOLDENS / "make_dpo.py", tmp_path / "dpo.json"], check=True, capture_output=True)
    again = json.loads((tmp_path / "dpo.json").read_text())
    assert again["policy"] == WRITTEN["policy"] and len(again["cases"]) == len(WRITTEN["cases"])
    for new, old in zip(again["cases"], WRITTEN["cases"], strict=True):
        assert new["section"] == old["section"]
        assert [new["loss"], *new["gradient"]] == pytest.approx([old["loss"], *old["gradient"]], rel=1e-5, abs=1e-7)


def test_dpo_by_hand() -> None:
    """beta .5, log-ratios 2 and -1: d = 3, loss log(1 + exp(-1.5)); IPO with means 1 and -.5: (1.5 - 1)^2."""
    batch = batch_of([sequence([0], [1, 2]), sequence([0], [3, 4])], [True, False], 2)
    batch.ref_logprobs = torch.zeros(6)
    outputs = Outputs(torch.tensor([0.0, 1.5, 0.5, 0.0, -0.25, -0.75]))
    loss, stats = PairObjective(DPOConfig(beta=0.5)).loss(outputs, batch, Norms(4.0, 2.0))
    assert loss.item() == pytest.approx(math.log1p(math.exp(-1.5)), rel=1e-6)
    assert [stats[f"rewards/{name}"].total for name in ("chosen", "rejected", "margins")] == [1.0, -0.5, 1.5]
    loss, _ = PairObjective(DPOConfig(beta=0.5, loss="ipo")).loss(outputs, batch, Norms(4.0, 2.0))
    assert loss.item() == pytest.approx(0.25)


def test_kto_by_hand() -> None:
    """beta 1, kl .5: a good answer of ratio 1 loses 1 - sigmoid(.5), a bad one 2 (1 - sigmoid(-.5))."""
    own = DPOConfig(loss="kto", beta=1.0, undesirable_weight=2.0)
    losses = kto(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), 0.5, own)
    assert losses.tolist() == pytest.approx([1 - 0.6224593, 2 * (1 - 0.3775407)], rel=1e-6)


def test_the_odds_of_certain_answers_have_finite_gradients() -> None:
    given = torch.tensor([0.0, -1e-9, -0.5, -60.0], requires_grad=True)
    orpo(given, torch.tensor([-1.0, -1.0, -1e-8, -2.0]), DPOConfig(loss="orpo")).sum().backward()
    assert given.grad is not None and given.grad.isfinite().all()


@pytest.mark.parametrize("rows", [[0, 2], [1, 0], [0]], ids=["other pairs", "swapped", "alone"])
def test_half_a_pair_is_an_error(rows: list[int]) -> None:
    batch = batch_of(*rows_of(labelled=False)).select(rows)
    with pytest.raises(ValueError, match="whole pairs in a micro-batch, the chosen answer first"):
        PairObjective(DPOConfig()).loss(Outputs(torch.zeros(batch.num_tokens)), batch, Norms(1.0, 2.0))
