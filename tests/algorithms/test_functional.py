"""Hand-computed values of the pure functions."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.algorithms import functional as F
from hpcrl.rollout.batch import Norms

REWARDS = torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0, 4.0])
GROUPS = torch.tensor([7, 7, 3, 7, 7, 3])  # members need not be neighbours


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("mean", "std", "eps", "expected"),
    [
        # group 7: mean .5, sample std sqrt(4 x .25 / 3) = .577350; group 3: mean 3, sample std sqrt(2)
        ("group", "group", 0.0, [0.866025, -0.866025, -0.707107, -0.866025, 0.866025, 0.707107]),
        ("group", "group", 0.5, [0.464102, -0.464102, -0.522408, -0.464102, 0.464102, 0.522408]),
        ("group", None, 0.0, [0.5, -0.5, -1.0, -0.5, 0.5, 1.0]),
        # batch: mean 4/3, sample std sqrt((2/9 + 32/9 + 4/9 + 64/9) / 5) = 1.505545
        ("batch", "batch", 0.0, [-0.221404, -0.885615, 0.442807, -0.885615, -0.221404, 1.771230]),
        ("group", "batch", 0.0, [0.332106, -0.332106, -0.664211, -0.332106, 0.332106, 0.664211]),
        (None, "group", 0.0, [1.732051, 0.0, 1.414214, 0.0, 1.732051, 2.828427]),
        (None, None, 0.0, [1.0, 0.0, 2.0, 0.0, 1.0, 4.0]),
    ],
)
def test_normalize_rewards(mean, std, eps, expected):
    close(F.normalize_rewards(REWARDS, GROUPS, mean, std, eps), expected)


@pytest.mark.parametrize("std", ["batch", "group", None])
def test_equal_rewards_and_single_members_normalise_to_zero(std):
    equal = torch.full((5,), 0.1)  # not a binary fraction: the mean is off by rounding
    close(F.normalize_rewards(equal, torch.zeros(5, dtype=torch.int64), "group", std, 0.0), [0.0] * 5)
    lone = F.normalize_rewards(torch.tensor([3.0]), torch.tensor([9]), "group", std, 1e-6)
    close(lone, [0.0])
    assert F.normalize_rewards(torch.empty(0), torch.empty(0, dtype=torch.int64), "group", std, 0.0).numel() == 0


def test_discounted_returns():
    rewards, rows = torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0]), torch.tensor([0, 0, 0, 2, 2])
    close(F.discounted_returns(rewards, rows, 0.5), [2.75, 3.5, 3.0, 20.0, 20.0])
    close(F.discounted_returns(rewards, rows, 1.0), [6.0, 5.0, 3.0, 30.0, 20.0])
    close(F.discounted_returns(rewards, rows, 0.0), rewards.tolist())
    assert F.discounted_returns(rewards[:0], rows[:0], 0.5).numel() == 0


@settings(max_examples=30, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5), gamma=st.floats(0, 1), seed=st.integers(0, 999))
def test_discounted_returns_equal_the_recurrence(lengths, gamma, seed):
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rewards = torch.randn(rows.numel(), generator=torch.Generator().manual_seed(seed))
    expected = rewards.double().clone()
    for t in reversed(range(rows.numel() - 1)):
        if rows[t] == rows[t + 1]:
            expected[t] += gamma * expected[t + 1]
    torch.testing.assert_close(F.discounted_returns(rewards, rows, gamma), expected.float(), rtol=1e-5, atol=1e-5)


def test_long_returns_neither_overflow_nor_vanish():
    rewards, rows = torch.zeros(50_000), torch.zeros(50_000, dtype=torch.int64)
    rewards[-1] = 1.0
    returns = F.discounted_returns(rewards, rows, 0.9)  # .9^-50000 is far beyond float64
    assert bool(torch.isfinite(returns).all())
    close(returns[-4:], [0.729, 0.81, 0.9, 1.0])


def test_whiten():
    # mean 2.5, unbiased variance 5/3
    close(F.whiten(torch.tensor([1.0, 2.0, 3.0, 4.0]), lambda x: x), [-1.161895, -0.387298, 0.387298, 1.161895])
    close(F.whiten(torch.tensor([2.0]), lambda x: x), [0.0])
    close(F.whiten(torch.tensor([2.0, 2.0]), lambda x: x), [0.0, 0.0])
    assert F.whiten(torch.empty(0), lambda x: x).numel() == 0


def test_whitening_over_ranks_equals_whitening_all_values_even_with_an_empty_rank():
    parts = [torch.tensor([1.0, 2.0, 30.0]), torch.empty(0), torch.tensor([4.0])]
    barrier, given_in = threading.Barrier(3, timeout=60), [torch.empty(0)] * 3
    results = [torch.empty(0)] * 3

    def run(rank):
        def all_sum(tensor):
            given_in[rank] = tensor
            barrier.wait()
            total = torch.stack(given_in).sum(0)
            barrier.wait()
            return total

        results[rank] = F.whiten(parts[rank], all_sum)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(torch.cat(results), F.whiten(torch.cat(parts), lambda x: x))
    assert not torch.allclose(results[0], F.whiten(parts[0], lambda x: x))  # on its own the result differs


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.5, -0.5, 0.0, 30.0, -900.0]),
        ("abs", [0.5, 0.5, 0.0, 30.0, 900.0]),
        ("k2", [0.125, 0.125, 0.0, 450.0, 405000.0]),
        ("k3", [0.106531, 0.148721, 0.0, 29.0, math.exp(20) * 881 - 901]),  # e^-.5 + .5 - 1, e^.5 - .5 - 1, 30 - 1
    ],
)
def test_kl_estimators(estimator, expected):
    difference = torch.tensor([0.5, -0.5, 0.0, 30.0, -900.0])
    found = F.kl_divergence(difference - 1.0, torch.full((5,), -1.0), estimator)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("estimator", "slope"),
    [("k1", torch.ones_like), ("abs", torch.sign), ("k2", lambda x: x), ("k3", lambda x: 1 - (-x).exp())],
)
def test_kl_estimators_have_correct_gradients_at_every_log_ratio(estimator, slope):
    x = torch.tensor([-20.0, -12.0, -5.0, -0.001, 0.001, 4.0, 4.6, 11.0, 19.0, 20.0, 25.0, 60.0], requires_grad=True)
    F.kl_divergence(x, torch.zeros_like(x), estimator).sum().backward()
    torch.testing.assert_close(x.grad, slope(x.detach()), rtol=1e-5, atol=1e-7)
    far = torch.tensor([-25.0, -900.0], requires_grad=True)
    F.kl_divergence(far, torch.zeros_like(far), estimator).sum().backward()
    torch.testing.assert_close(far.grad, slope(far.detach().clamp(min=-20 if estimator == "k3" else -1e9)))


def test_k3_is_exact_near_zero_in_float32():
    x = torch.tensor([1e-4, -1e-4])
    torch.testing.assert_close(F.kl_divergence(x, torch.zeros(2), "k3"), 0.5 * x.square(), rtol=1e-2, atol=0)


def test_clipped_policy_loss():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    loss, clipped = F.clipped_policy_loss(ratio, advantages, 0.2, 0.2, None)
    close(loss, [-1.2, 1.5, -0.5, 0.8, -2.0])
    close(clipped, [1.0, 0.0, 0.0, 1.0, 0.0])
    loss, _ = F.clipped_policy_loss(ratio, advantages, 0.4, 0.28, None)  # clip-higher
    close(loss, [-1.28, 1.5, -0.5, 0.6, -2.0])


def test_dual_clip_bounds_negative_advantages_only():
    ratio = torch.tensor([5.0, 5.0, 2.9, 0.1], requires_grad=True)
    advantages = torch.tensor([-2.0, 2.0, -2.0, -2.0])
    loss, clipped = F.clipped_policy_loss(ratio, advantages, 0.2, 0.2, 3.0)
    close(loss.detach(), [6.0, -2.4, 5.8, 1.6])
    close(clipped, [1.0, 1.0, 0.0, 1.0])
    loss.sum().backward()
    close(ratio.grad, [0.0, 0.0, 2.0, 0.0])


def test_importance_ratio_stays_finite():
    ratio = F.importance_ratio(torch.tensor([-1.0, 0.0, -900.0]), torch.tensor([-1.5, -900.0, 0.0]))
    close(ratio[:1], [1.648721])
    assert bool(torch.isfinite(ratio).all())


def test_aggregation():
    # rows of 3, 0 and 1 tokens with weights 1, 5 and 2
    rows, weights = torch.tensor([0, 0, 0, 2]), torch.tensor([1.0, 5.0, 2.0])
    values, norms = torch.tensor([1.0, 2.0, 6.0, 4.0]), Norms(tokens=5.0, sequences=3.0)
    expected = {"token-mean": 17 / 5, "seq-mean-token-sum": 17 / 3, "seq-mean-token-mean": (3 + 8) / 3}
    for mode, result in expected.items():
        total = (F.token_weights(rows, weights, mode) * values).sum() / F.denominator(norms, mode)
        close(total, result)
    assert F.denominator(Norms(0.0, 0.0), "token-mean") == 1.0


LOG2 = 0.6931472


@pytest.mark.parametrize(
    ("level", "correction", "low", "high", "weights", "cut"),
    [
        # rows (0, 0, 0, 2); ratios 2, 1/4, 4 of row 0: product 2, geometric mean 2^(1/3) = 1.259921; ratio 1/2 of row 2
        ("token", "truncate", 0.4, 3.0, [2.0, 0.25, 3.0, 0.5], [0, 0, 1, 0]),
        ("token", "mask", 0.4, 3.0, [2.0, 0.0, 0.0, 0.5], [0, 1, 1, 0]),
        ("sequence", "truncate", 0.4, 3.0, [2.0, 2.0, 2.0, 0.5], [0, 0, 0, 0]),
        ("sequence", "truncate", 0.6, 1.5, [1.5, 1.5, 1.5, 0.5], [1, 1, 1, 0]),  # no lower bound
        ("sequence", "mask", 0.4, 1.5, [0.0, 0.0, 0.0, 0.5], [1, 1, 1, 0]),
        ("sequence", "mask", 0.6, 3.0, [2.0, 2.0, 2.0, 0.0], [0, 0, 0, 1]),
        ("geometric", "truncate", 0.6, 1.5, [1.259921, 1.259921, 1.259921, 0.5], [0, 0, 0, 0]),
        ("geometric", "truncate", 0.6, 1.2, [1.2, 1.2, 1.2, 0.5], [1, 1, 1, 0]),
        ("geometric", "mask", 0.4, 3.0, [1.259921, 1.259921, 1.259921, 0.5], [0, 0, 0, 0]),
        ("geometric", "mask", 0.6, 1.2, [0.0, 0.0, 0.0, 0.0], [1, 1, 1, 1]),
        # turns (0, 0, 1) of row 0: geometric means (2 / 4)^(1/2) = .707107 and 4
        ("turn", "truncate", 0.6, 3.0, [0.707107, 0.707107, 3.0, 0.5], [0, 0, 1, 0]),
        ("turn", "mask", 0.6, 5.0, [0.707107, 0.707107, 4.0, 0.0], [0, 0, 0, 1]),
        ("turn", "reject", 0.4, 3.0, [0.0, 0.0, 0.0, 1.0], [1, 1, 1, 0]),
        ("token", "reject", 0.4, 5.0, [0.0, 0.0, 0.0, 1.0], [1, 1, 1, 0]),
        ("token", "reject", 0.2, 5.0, [1.0, 1.0, 1.0, 1.0], [0, 0, 0, 0]),
        ("geometric", "reject", 0.6, 1.5, [1.0, 1.0, 1.0, 0.0], [0, 0, 0, 1]),
        ("sequence", "reject", 0.4, 1.5, [0.0, 0.0, 0.0, 1.0], [1, 1, 1, 0]),
    ],
)
def test_behaviour_weights(level, correction, low, high, weights, cut):
    old = torch.tensor([-1.0, -2.0, -3.0, -1.0], requires_grad=True)
    behaviour = old.detach() - LOG2 * torch.tensor([1.0, -2.0, 2.0, -1.0])
    rows, turns = torch.tensor([0, 0, 0, 2]), torch.tensor([0, 0, 1, 1])
    found, where = F.behaviour_weights(old, behaviour, rows, turns, level, correction, low, high)
    close(found, weights)
    close(where, [float(value) for value in cut])
    assert not found.requires_grad


def test_behaviour_weights_of_equal_policies_are_one_and_finite():
    logprobs, rows, turns = torch.tensor([-1.0, -30.0]), torch.tensor([0, 1]), torch.tensor([0, 0])
    for level in ("token", "turn", "geometric", "sequence"):
        for correction in ("mask", "reject"):
            weights = F.behaviour_weights(logprobs, logprobs, rows, turns, level, correction, 0.9, 1.1)[0]
            close(weights, [1.0, 1.0])
    far = F.behaviour_weights(logprobs, logprobs - 1e4, rows, turns, "token", "truncate", 0.0, 1e30)[0]
    assert bool(torch.isfinite(far).all())
    none = torch.empty(0)
    for level in ("token", "turn", "geometric", "sequence"):
        assert not len(F.behaviour_weights(none, none, none.long(), none.long(), level, "reject", 0.9, 1.1)[0])
