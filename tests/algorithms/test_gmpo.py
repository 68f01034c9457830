"""GMPO by hand, and against a plain reading of the paper's formula, which is verl's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hpcrl.algorithms.interface import Outputs
from hpcrl.algorithms.spec import GRPO
from hpcrl.metrics.stats import flatten
from hpcrl.rollout.batch import Batch
from tests.algorithms.pairs import make_pair
from tests.algorithms.test_algorithms import make_batch, norms_of

CONFIG = GRPO(
    surrogate="gmpo", pg_clip_low=0.3, pg_clip_high=0.4, loss_aggregation="seq-mean-token-mean", num_mini_batches=2
)


def of_batch(batch: Batch, logprobs: Tensor, config: GRPO = CONFIG) -> tuple[Tensor, dict[str, float]]:
    loss, stats = make_pair(config).objective.loss(Outputs(logprobs), batch, norms_of(batch))
    return loss, flatten(stats)


def test_clipped_loss_and_gradient_by_hand() -> None:
    batch, _ = make_batch([[0, 1, 1], [0, 1, 1]], [0.0] * 2, [0] * 2)
    batch.advantages = torch.tensor([0, 2.0, 2.0, 0, -1.0, -1.0])
    moved = torch.tensor([0, 0.9, -0.5, 0, 0.1, -0.9])  # .9 is cut at .4, -.9 at -.3; -.5 goes against A
    logprobs = (batch.old_logprobs + moved).requires_grad_()
    loss, stats = of_batch(batch, logprobs)
    first, second = math.exp((0.4 - 0.5) / 2), math.exp((0.1 - 0.3) / 2)
    assert loss.item() == pytest.approx((-2 * first + second) / 2) and stats["actor/clipfrac"] == 0.5
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([0, 0, -2 * first / 2 / 2, 0, second / 2 / 2, 0])


def test_value_and_gradient_match_the_formula() -> None:
    """verl 1dda039, core_algos.py, geo_mean: the sign of each token's advantage times the smaller of its signed
    log-ratio and the signed clipped one; the exponential of the mean over the response, times the mean advantage."""
    masks = [[0, 1, 1], [0, 0, 1, 0, 1, 1], [0, 1], [0, 1, 1, 1, 1], [0, 1, 0, 0, 1]]
    batch, _ = make_batch(masks, [0.0] * 5, [0] * 5, seed=5)
    tokens = torch.arange(batch.num_tokens)
    batch.advantages = (torch.tensor([0.7, -1.3, 2.0, -0.4, 1.1])[batch.row_ids] + torch.cos(tokens)) * batch.loss_mask
    start = batch.old_logprobs + 0.6 * torch.sin(3 * tokens)
    logprobs, other = (start.clone().requires_grad_() for _ in range(2))
    loss, stats = of_batch(batch, logprobs)
    loss.backward()
    total = torch.zeros(())
    for row in range(5):
        mask = batch.loss_mask & (batch.row_ids == row)
        d, a = (other - batch.old_logprobs)[mask], batch.advantages[mask]
        signed = torch.minimum(a.sign() * d, a.sign() * d.clamp(-CONFIG.pg_clip_low, CONFIG.pg_clip_high))
        total = total - (a.sign() * signed).mean().exp() * a.mean() / 5
    total.backward()
    assert 0 < stats["actor/clipfrac"] < 1
    torch.testing.assert_close(loss, total)
    torch.testing.assert_close(logprobs.grad, other.grad)
    wider = of_batch(batch, start, CONFIG.model_copy(update={"pg_clip_high": 0.5}))[0]
    assert abs(wider - total) > 1e-4


def test_the_first_optimizer_step_is_the_policy_gradient() -> None:
    batch, _ = make_batch([[0, 1, 1], [0, 1, 1, 1]], [0.0] * 2, [0] * 2)
    batch.advantages = torch.tensor([1.0, -0.5])[batch.row_ids] * batch.loss_mask
    gradients = []
    for surrogate in ("gmpo", "vanilla"):
        logprobs = batch.old_logprobs.clone().requires_grad_()
        of_batch(batch, logprobs, CONFIG.model_copy(update={"surrogate": surrogate}))[0].backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(*gradients)
