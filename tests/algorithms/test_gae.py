"""PPO with a critic: advantages and returns from values, and the value loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hpcrl.algorithms.interface import Outputs
from hpcrl.algorithms.spec import GAE, Reinforce, TurnGAE
from hpcrl.algorithms.value_loss import ValueLoss
from hpcrl.metrics.stats import flatten, merge
from hpcrl.rollout.batch import Batch
from tests.algorithms.pairs import make_pair
from tests.algorithms.test_algorithms import advantages, make_batch, mixed_batch, norms_of


def with_values(batch: Batch) -> Batch:
    values = 1.5 * torch.cos(2.0 * batch.position_ids + batch.sample_ids[batch.row_ids])
    batch.values = values * batch.loss_mask
    return batch


def test_gae_over_two_turns_by_hand() -> None:
    """One row: two prompt tokens, model tokens a, b, an observation, c, d; and a row of one model token."""
    batch, table = make_batch([[0, 0, 1, 1, 0, 1, 1], [0, 1]], [2.0, 1.0], [0, 1])
    batch.values = torch.tensor([0, 0, 1.0, 0.5, 9.0, 3.0, 2.0, 0, 0.25])  # of the observation: not read
    stats = flatten(advantages(make_pair(GAE(gamma=0.5, lambd=0.5, whiten_advantages=False)), batch, table))
    # delta: a .5 x .5 - 1 = -.75, b .5 x 3 - .5 = 1 (the observation is skipped), c .5 x 2 - 3 = -2, d 2 - 2 = 0
    # A: d 0, c -2, b 1 + .25 x -2 = .5, a -.75 + .25 x .5 = -.625; the other row: 1 - .25 = .75
    assert batch.advantages.tolist() == [0, 0, -0.625, 0.5, 0, -2.0, 0, 0, 0.75]
    assert batch.returns.tolist() == [0, 0, 0.375, 1.0, 0, 1.0, 2.0, 0, 1.0]
    returns, errors = torch.tensor([0.375, 1, 1, 2, 1]), torch.tensor([-0.625, 0.5, -2, 0, 0.75])
    explained = 1 - errors.var().item() / returns.var().item()
    assert stats["critic/explained_variance"] == pytest.approx(explained)
    assert (stats["critic/values/mean"], stats["critic/values/max"]) == (6.75 / 5, 3.0)
    assert (stats["critic/returns/max"], stats["critic/advantages/min"]) == (2.0, -2.0)


def test_lambda_1_gives_returns_minus_values_and_lambda_0_one_step_errors() -> None:
    batch, table = mixed_batch()
    with_values(batch)
    advantages(make_pair(GAE(gamma=0.9, lambd=1.0, whiten_advantages=False)), batch, table)
    got = batch.returns
    other, _ = mixed_batch()
    advantages(make_pair(Reinforce(gamma=0.9)), other, table)
    torch.testing.assert_close(got, other.returns)
    learnt = batch.loss_mask & (batch.weights > 0)[batch.row_ids]
    torch.testing.assert_close(batch.advantages, (other.returns - batch.values) * learnt)
    advantages(make_pair(GAE(gamma=1.0, lambd=0.0, whiten_advantages=False)), batch, table)
    last = batch.returns[2], batch.returns[1]  # row 0 has model tokens 1 and 2 and reward 1
    assert last[0] == 1.0 and last[1] == batch.values[2]


def test_gae_over_turns_and_their_tokens_by_hand() -> None:
    """A turn of the tokens a, b, an observation, and a turn of c, d; and a row of one token."""
    batch, table = make_batch([[0, 0, 1, 1, 0, 1, 1], [0, 1]], [3.0, 1.0], [0, 1])
    batch.values = torch.tensor([0, 0, 1.0, 0.5, 9.0, 3.0, 1.0, 0, 0.25])
    batch.turn_rewards = torch.tensor([1.0, 2.0, 1.0])
    section = TurnGAE(gamma=0.5, lambd=0.5, turn_gamma=0.5, turn_lambd=0.5, whiten_advantages=False)
    advantages(make_pair(section), batch, table)
    # turns: at d 2 - 1 = 1; at b 1 + .5 x 1 - .5 = 1, and 1 + .25 x 1 = 1.25
    # tokens: a .5 x .5 - 1 + .25 x 1.25 = -.4375, c .5 x 1 - 3 + .25 x 1 = -2.25
    assert batch.advantages.tolist() == [0, 0, -0.4375, 1.25, 0, -2.25, 1.0, 0, 0.75]
    assert batch.returns.tolist() == [0, 0, 0.5625, 1.75, 0, 0.75, 2.0, 0, 1.0]
    batch.turn_rewards = None
    advantages(make_pair(section.model_copy(update={"reward_clip": 2.5})), batch, table)
    # without turn rewards the last turn has the row's reward: d 2.5 - 1, b .5 x 1 - .5 + .25 x 1.5
    assert batch.advantages[[3, 6]].tolist() == [0.375, 1.5]


def test_turns_do_not_change_gae_without_discounts() -> None:
    ours = TurnGAE(lambd=1.0, turn_gamma=1.0, turn_lambd=1.0, kl_reward_coef=0.3, whiten_advantages=False)
    for discount, equal in ((1.0, True), (0.9, False)):
        found = []
        for section in (GAE(lambd=1.0, whiten_advantages=False), ours.model_copy(update={"turn_gamma": discount})):
            batch, table = make_batch([[0, 1, 1, 0, 0, 1], [0, 1, 1]], [1.0, -2.0], [0, 1])
            batch.old_logprobs = batch.ref_logprobs = torch.zeros(9)
            advantages(make_pair(section), with_values(batch), table)
            found.append(batch.advantages)
        assert torch.allclose(*found, atol=1e-6) == equal
        torch.testing.assert_close(found[0][6:], found[1][6:])  # a single turn has no other


def naive(batch: Batch, config: GAE) -> tuple[Tensor, Tensor]:
    """Token by token, backwards, as verl's loop: a token outside the mask keeps what came after it."""
    result, returns = torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens)
    kl = config.kl_reward_coef * (batch.old_logprobs - batch.ref_logprobs)
    for row in range(batch.num_sequences):
        if batch.weights[row] == 0:
            continue
        next_value = next_advantage = 0.0
        is_last = True
        for t in reversed(range(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1]))):
            if not batch.loss_mask[t]:
                continue
            reward = (batch.rewards[row].item() if is_last else 0.0) - kl[t].item()
            delta = reward + config.gamma * next_value - batch.values[t].item()
            next_advantage = delta + config.gamma * config.lambd * next_advantage
            next_value, is_last = batch.values[t].item(), False
            result[t], returns[t] = next_advantage, next_advantage + next_value
    return result, returns


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lambd", [1.0, 0.95, 0.0])
def test_gae_equals_a_naive_loop_with_kl_in_the_reward(gamma: float, lambd: float) -> None:
    batch, table = mixed_batch()
    config = GAE(gamma=gamma, lambd=lambd, kl_reward_coef=0.3, whiten_advantages=False)
    algorithm = make_pair(config)
    assert algorithm.estimator is not None and algorithm.estimator.reads == {"values", "old_logprobs", "ref_logprobs"}
    advantages(algorithm, with_values(batch), table)
    expected = naive(batch, config)
    torch.testing.assert_close(batch.advantages, expected[0])
    torch.testing.assert_close(batch.returns, expected[1])
    wrong = naive(batch, config.model_copy(update={"gamma": 0.8}))
    assert (wrong[0] - expected[0]).abs().max() > 0.1, "the test can fail"


def test_advantages_are_whitened_and_returns_are_not() -> None:
    batch, table = mixed_batch()
    with_values(batch).weights = torch.ones(7)
    advantages(make_pair(GAE(whiten_advantages=False)), batch, table)
    returns = batch.returns
    stats = advantages(make_pair(GAE(advantage_clip=1.0)), batch, table)
    assert torch.equal(batch.returns, returns) and batch.advantages.abs().max() == 1.0
    assert flatten(stats)["critic/returns/max"] == returns[batch.loss_mask].max().item()


def test_missing_values_are_named() -> None:
    batch, table = mixed_batch()
    with pytest.raises(ValueError, match=r"batch\.values must be filled for an algorithm with a critic"):
        advantages(make_pair(GAE()), batch, table)


# -- the value loss


def loss_of(objective: ValueLoss, batch: Batch, parts: list[list[int]]) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient of three parameters, and statistics over these micro-batches."""
    theta, total, collected = torch.tensor([0.4, 0.1, 0.7], requires_grad=True), 0.0, []
    norms = norms_of(batch)
    for rows in parts:
        part = batch.select(rows)
        values = part.values + theta[0] * torch.sin(part.position_ids.float()) + theta[1] * theta[2]
        loss, stats = objective.loss(Outputs(torch.zeros_like(values), values=values), part, norms)
        (loss + 0.0 * theta.sum()).backward()
        total += loss.item()
        collected.append(stats)
    assert theta.grad is not None
    return total, theta.grad, flatten(merge(collected))


def learnt_batch(seed: int = 0) -> Batch:
    batch, table = mixed_batch(seed)
    advantages(make_pair(GAE()), with_values(batch), table)
    return batch


@pytest.mark.parametrize("clip", [None, 0.2, 5.0])
def test_value_loss_matches_the_formula(clip: float | None) -> None:
    batch = learnt_batch()
    loss, gradient, stats = loss_of(ValueLoss(clip), batch, [list(range(7))])
    theta = torch.tensor([0.4, 0.1, 0.7], requires_grad=True)
    total, num_clipped, weight = torch.zeros(()), 0.0, 0.0
    for t in batch.loss_mask.nonzero()[:, 0].tolist():
        old, target, w = batch.values[t], batch.returns[t], batch.weights[batch.row_ids[t]].item()
        value = old + theta[0] * math.sin(batch.position_ids[t]) + theta[1] * theta[2]
        error, weight = (value - target) ** 2, weight + w
        if clip is not None:
            bounded = (min(max(value, old - clip), old + clip) - target) ** 2
            num_clipped += w * float(bounded > error)
            error = max(error, bounded)
        total = total + 0.5 * w * error
    (total / weight).backward()
    assert loss == pytest.approx((total / weight).item(), rel=1e-5)
    torch.testing.assert_close(gradient, theta.grad, rtol=1e-5, atol=1e-6)
    assert stats["critic/loss"] == pytest.approx(loss, rel=1e-5)
    assert stats["critic/clipfrac"] == pytest.approx(num_clipped / weight)
    assert (num_clipped > 0) == (clip == 0.2)
    assert stats["critic/error"] == pytest.approx(2 * loss_of(ValueLoss(None), batch, [list(range(7))])[0], rel=1e-5)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(homes=st.lists(st.integers(0, 3), min_size=7, max_size=7), seed=st.integers(0, 9))
def test_value_loss_does_not_depend_on_the_split(homes: list[int], seed: int) -> None:
    batch = learnt_batch(seed)
    whole = loss_of(ValueLoss(0.2), batch, [list(range(7))])
    split = loss_of(ValueLoss(0.2), batch, [[r for r in range(7) if homes[r] == part] for part in range(4)])
    assert split[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(split[1], whole[1], rtol=1e-5, atol=1e-6)
    assert split[2] == pytest.approx(whole[2], rel=1e-5, abs=1e-6)


def test_responses_of_weight_0_do_not_train_the_critic() -> None:
    batch = learnt_batch()
    batch.weights = torch.tensor([0.0, 1, 1, 1, 1, 1, 1])
    kept: Any = batch.select([1, 2, 3, 4, 5, 6])
    assert loss_of(ValueLoss(0.2), batch, [list(range(7))])[0] == loss_of(ValueLoss(0.2), kept, [list(range(6))])[0]
