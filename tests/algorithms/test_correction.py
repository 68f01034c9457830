"""The off-policy correction: by hand, and against a plain reading of verl's formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hpcrl.algorithms.correction import corrected
from hpcrl.algorithms.interface import Outputs
from hpcrl.algorithms.spec import GRPO
from hpcrl.metrics.stats import flatten
from hpcrl.rollout.batch import Batch
from tests.algorithms.pairs import make_pair
from tests.algorithms.test_algorithms import make_batch, norms_of

LOG2 = math.log(2)
SEQUENCES, TURNS = torch.tensor([0, 0, 0, 2]), torch.tensor([0, 0, 1, 1])
RATIOS = LOG2 * torch.tensor([1.0, -2.0, 2.0, -1.0])
"""Log-ratios of the trainer to the generator: the first row has ratios 2, 1/4, 4, product 2; the second 1/2."""


def weights(**keys: Any) -> tuple[list[float], list[float] | None]:
    old = torch.tensor([-1.0, -2.0, -3.0, -1.0], requires_grad=True)
    found = corrected(GRPO(**keys), old, old.detach() - RATIOS, SEQUENCES, TURNS)
    assert not found.weights.requires_grad
    return found.weights.tolist(), None if found.rejected is None else found.rejected.tolist()


def test_truncated_weights_and_rejection_by_hand() -> None:
    truncated = {"correction": "truncate", "correction_high": 1.5}
    assert weights(**truncated)[0] == pytest.approx([1.5, 0.25, 1.5, 0.5]) and weights(**truncated)[1] is None
    keys = truncated | {"rejection_level": "geometric", "rejection_low": 0.6, "rejection_high": 1.3}  # 2^(1/3) = 1.26
    assert weights(**keys) == (pytest.approx([1.5, 0.25, 1.5, 0.0]), [0, 0, 0, 1])
    keys |= {"rejection_level": "sequence", "rejection_low": 0.4}  # 2 and 1/2
    assert weights(**keys) == (pytest.approx([0.0, 0.0, 0.0, 0.5]), [1, 1, 1, 0])
    keys |= {"rejection_level": "token", "rejection_low": 0.3, "rejection_high": 9}  # one of 1/4
    assert weights(**keys) == (pytest.approx([0.0, 0.0, 0.0, 0.5]), [1, 1, 1, 0])
    keys |= {"rejection_level": "turn", "rejection_low": 0.3, "rejection_high": 3}  # turns 1/sqrt(2) and 4
    assert weights(**keys) == (pytest.approx([0.0, 0.0, 0.0, 0.5]), [1, 1, 1, 0])
    masked = {"correction": "mask", "correction_low": 0.4, "correction_high": 3, "rejection_level": "geometric"}
    assert weights(**masked, rejection_low=0.6, rejection_high=1.3) == (pytest.approx([2.0, 0, 0, 0]), [0, 0, 0, 1])
    assert weights(**masked, rejection_low=0.4, rejection_high=1.3) == (pytest.approx([2.0, 0, 0, 0.5]), [0, 0, 0, 0])


def test_loss_with_truncation_and_rejection_matches_verl() -> None:
    """verl 1dda039, rollout_corr_helper.py: rollout_is=token with a threshold, rollout_rs=seq_mean_k1 with two: a
    response is kept while the mean of log(generator / trainer) lies between the logarithms of both. Its token-mean then
    divides by the tokens that are left, and hpcrl by all."""
    batch, _ = make_batch([[0, 1, 1], [0, 0, 1, 0, 1, 1], [0, 1, 1, 1, 1]], [0.0] * 3, [0] * 3, seed=3)
    batch.advantages = torch.tensor([0.7, -1.3, 0.4])[batch.row_ids] * batch.loss_mask
    batch.gen_logprobs = batch.old_logprobs + torch.cos(2 * torch.arange(batch.num_tokens)) - 0.1
    high, low, most = 1.2, 0.8, 1.25
    total, kept = 0.0, 0
    for row in range(3):
        mask = batch.loss_mask & (batch.row_ids == row)
        log_ratio = (batch.old_logprobs - batch.gen_logprobs)[mask]
        if math.log(low) <= -log_ratio.mean().item() <= math.log(most):
            total -= (log_ratio.exp().clamp(max=high) * batch.advantages[mask]).sum().item()
            kept += int(mask.sum())
    assert 0 < kept < int(batch.loss_mask.sum()) and total
    keys: dict[str, Any] = {"rejection_level": "geometric", "rejection_low": 1 / most, "rejection_high": 1 / low}
    pair = make_pair(GRPO(correction="truncate", correction_high=high, **keys))
    loss, stats = pair.objective.loss(Outputs(batch.old_logprobs.clone()), batch, norms_of(batch))
    assert loss.item() == pytest.approx(total / 9, rel=1e-5)
    assert flatten(stats)["actor/rejected_ratio"] == pytest.approx(1 - kept / 9)


def prepared(batch: Batch, **keys: Any) -> tuple[float, float]:
    """(scale of the weights, mean before scaling); the loss uses the scaled weights."""
    pair = make_pair(GRPO(correction_normalize=True, **keys))
    assert "old_logprobs" in pair.reads
    mean = flatten(pair.objective.prepare(batch, lambda tensor: tensor))["actor/correction_norm"]
    scale = batch.correction_scale.unique().item()
    plain, scaled = (
        make_pair(GRPO(correction_normalize=normalize, **keys)).objective.loss(
            Outputs(batch.old_logprobs.clone()), batch, norms_of(batch)
        )[0]
        for normalize in (False, True)
    )
    assert plain.abs() > 0.01 and scaled.item() == pytest.approx(scale * plain.item(), rel=1e-5)
    return scale, mean


def test_weights_normalised_to_mean_1_by_hand() -> None:
    batch, _ = make_batch([[0, 1, 1, 1], [0, 1], [0, 1]], [0.0] * 3, [0] * 3)
    batch.advantages = torch.tensor([2.0, 1.0, -1.0])[batch.row_ids] * batch.loss_mask
    log_ratio = LOG2 * torch.tensor([0, 1.0, -2.0, 2.0, 0, -1.0, 0, 5.0])
    batch.gen_logprobs = batch.old_logprobs - log_ratio
    batch.weights = torch.tensor([1.0, 2.0, 0.0])
    token = (1.5 + 0.25 + 1.5 + 2 * 0.5) / 5  # cut at 1.5; a row of weight 2; one of weight 0
    assert prepared(batch, correction="truncate", correction_high=1.5) == pytest.approx((1 / token, token))
    whole = (1.5 + 2 * 0.5) / 3  # products 2, cut at 1.5, and 1/2: one weight for each response
    keys = {"correction": "truncate", "correction_level": "sequence", "correction_high": 1.5}
    assert prepared(batch, **keys) == pytest.approx((1 / whole, whole))
    rejecting = keys | {"rejection_level": "token", "rejection_low": 0.3, "rejection_high": 9}
    assert prepared(batch, **rejecting) == pytest.approx((1 / whole, whole)), "before responses are dropped"
    assert prepared(batch, correction="reject", correction_low=0.3) == pytest.approx((5 / 2, 2 / 5))


def test_all_zero_weights_cause_no_division_by_zero() -> None:
    batch, _ = make_batch([[0, 1]], [0.0], [0])
    batch.gen_logprobs = batch.old_logprobs - 5
    objective = make_pair(GRPO(correction="mask", correction_normalize=True)).objective
    for part in (batch, batch.select([])):
        objective.prepare(part, lambda tensor: tensor)
        assert part.correction_scale.tolist() == [1.0] * part.num_sequences
    assert make_pair(GRPO(correction_normalize=True)).objective.prepare(batch, lambda tensor: tensor) == {}
