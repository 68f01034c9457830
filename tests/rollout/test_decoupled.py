"""Decoupled rewards by hand: parts, rewards outside them, errors, failed episodes, and the filter of equal rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from hpcrl.config import parse
from hpcrl.rollout.scheduling.events import DoneSample
from hpcrl.rollout.scheduling.policies import Decoupling, SchedulerConfig, rejecting_filter
from hpcrl.rollout.types import FinishReason

WEIGHTS = {"right": 2.0, "short": 0.5}
ROOT_HALF = 0.5**0.5


def scored(parts: Mapping[str, float], weights: Mapping[str, float] = WEIGHTS, beside: float = 0.0) -> DoneSample:
    """A response whose reward is the weighted sum of the parts plus a further reward."""
    reward = sum(weights[name] * value for name, value in parts.items()) + beside
    return DoneSample(1, 0, 4, FinishReason.STOP, reward, 0.0, metrics={**parts, "other": 7.0})


def decoupled(*samples: DoneSample, weights: Mapping[str, float] = WEIGHTS) -> list[float]:
    return Decoupling(0.0, lambda domain: weights).rewards("", samples)


def test_each_reward_part_is_compared_with_its_own_mean() -> None:
    """Of two values apart by any distance, the upper is the mean plus sqrt(1/2) sample deviations."""
    found = decoupled(scored({"right": 1.0, "short": 0.0}), scored({"right": 0.0, "short": 30.0}))
    assert found == pytest.approx([1.5 * ROOT_HALF, -1.5 * ROOT_HALF])
    found = decoupled(scored({"right": 1.0, "short": 5.0}), scored({"right": 0.0, "short": 5.0}))
    assert found == pytest.approx([2 * ROOT_HALF, -2 * ROOT_HALF]), "a part without spread adds nothing"


def test_rewards_outside_the_parts_form_one_more_part() -> None:
    same = {"right": 1.0, "short": 0.1}
    assert decoupled(scored(same, beside=0.25), scored(same)) == pytest.approx([ROOT_HALF, -ROOT_HALF])
    assert decoupled(scored(same), scored(same)) == [0.0, 0.0]
    assert decoupled(scored(same), scored({"right": 0.0, "short": 0.1}), weights={}) == pytest.approx(
        [ROOT_HALF, -ROOT_HALF]
    )


def test_rounding_errors_do_not_form_a_part() -> None:
    """1e7 + .1 - 1e7 is not .1; the rest has a deviation of 1e-9 of the reward, which must not become 1."""
    weights = {"large": 1e12, "small": 0.1}
    first, second = scored({"large": 1.0, "small": 1.0}, weights), scored({"large": 1.0, "small": 3.0}, weights)
    off = replace(first, reward=first.reward + 1e-4)
    assert decoupled(off, second, weights=weights) == pytest.approx([-0.1 * ROOT_HALF, 0.1 * ROOT_HALF])


def test_errors_have_no_parts_and_failed_episodes_are_ignored() -> None:
    right, wrong = scored({"right": 1.0, "short": 0.0}), scored({"right": 0.0, "short": 0.0})
    error = replace(right, reward=0.0, error="ValueError: no")
    assert decoupled(right, error) == pytest.approx(decoupled(right, wrong))
    failed = replace(right, reward=100.0, failed=True)
    assert decoupled(right, failed, wrong) == pytest.approx([2 * ROOT_HALF, 0.0, -2 * ROOT_HALF])
    assert decoupled(right, failed) == [0.0, 0.0]


def test_groups_with_differing_parts_pass_the_filter_of_equal_rewards() -> None:
    parts = {"right": {"name": "exact_match", "weight": 2.0}, "short": {"name": "length", "weight": 0.5}}
    reward = {"name": "composed", "options": {"parts": parts}}
    words = {"reward": {"maths": reward}, "rollout": {"filter_std": True}}
    cancelling = [scored({"right": 1.0, "short": 0.0}), scored({"right": 0.0, "short": 4.0})]
    equal = [scored({"right": 1.0, "short": 0.0})] * 2
    for algorithm, told in (("grpo", "std"), ("gdpo", "")):
        config = SchedulerConfig.of(parse(words | {"algorithm": {"advantage_estimator": algorithm}}))
        assert rejecting_filter(cancelling, config, domain="maths") == told
        assert rejecting_filter(equal, config, domain="maths") == "std"
