"""Coefficients and running statistics that an algorithm adapts from step to step, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hpcrl.algorithms.adaptive import adapted
from hpcrl.algorithms.interface import RewardTable
from hpcrl.algorithms.spec import GRPO, Reinforce
from hpcrl.metrics.stats import Stat
from hpcrl.rollout.batch import Norms
from tests.algorithms.pairs import make_pair
from tests.algorithms.test_algorithms import Outputs, advantages, identity, make_batch


def told(kl: float, entropy: float = 1.0, responses: int = 50) -> dict[str, Stat]:
    return {
        "critic/kl": Stat(kl * 400, 400),
        "critic/entropy/mean": Stat(entropy * 400, 400),
        "critic/score/*": Stat(0, responses),
    }


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(0.2, 1.0), (0.22, 1.05), (0.18, 0.95), (5.0, 1.1), (-5.0, 0.9)],  # the error is cut at .2, times 50 / 100
)
def test_the_kl_coefficients_follow_the_target(kl: float, factor: float) -> None:
    config = GRPO(kl_loss_coef=0.1, kl_target=0.2, kl_horizon=100)
    first = adapted(config, {}, told(kl))
    assert first == {"actor/kl_scale": pytest.approx(factor)}
    assert adapted(config, first, told(kl)) == {"actor/kl_scale": pytest.approx(factor**2)}
    assert 0 < adapted(config, {}, told(0.0, responses=5000))["actor/kl_scale"] == pytest.approx(0.8)
    assert adapted(config, first, {}) == first, "a step of which masks leave nothing changes nothing"
    assert adapted(config, first, told(math.nan)) == first, "it would stay in every later step"
    assert adapted(GRPO(kl_loss_coef=0.1), {}, told(kl)) == {}


def test_the_entropy_bonus_follows_the_target() -> None:
    config = GRPO(entropy_target=0.5, entropy_coef_step=0.1)
    coefficients: dict[str, float] = {}
    coefs = []
    for entropy in (0.4, 0.4, 0.6, 0.4, 0.6, 0.6, 0.6, 0.6, 0.4):
        coefficients = adapted(config, coefficients, told(0.0, entropy))
        coefs.append(coefficients["actor/entropy_coef"])
    assert coefs == pytest.approx([0.1, 0.2, 0, 0.2, 0, 0, 0, 0, 0.1])
    assert adapted(GRPO(entropy_target=0.5, entropy_loss_coef=1.0), {}, told(0, 0.4))["actor/entropy_coef"] == 1.005


def test_the_loss_and_the_reward_use_the_adapted_coefficients() -> None:
    """A run with factor 3 equals one whose coefficients are three times as large."""
    losses, estimators = [], []
    for scale, config in (
        (3.0, Reinforce(kl_loss_coef=0.1, kl_reward_coef=0.2, kl_target=1.0, entropy_target=1.0)),
        (1.0, Reinforce(kl_loss_coef=0.3, kl_reward_coef=0.6, entropy_loss_coef=0.7)),
        (1.0, Reinforce(kl_loss_coef=0.1, kl_reward_coef=0.2, entropy_loss_coef=0.7)),
    ):
        batch, table = make_batch([[0, 1, 1], [0, 1]], [1.0, 0.0], [0, 0])
        pair = make_pair(config)
        pair.take({"actor/kl_scale": scale, "actor/entropy_coef": 0.7})
        advantages(pair, batch, table)
        estimators.append(batch.returns.tolist())
        assert "entropy" in pair.objective.outputs
        outputs = Outputs(batch.old_logprobs + 0.1, torch.ones(batch.num_tokens))
        losses.append(pair.objective.loss(outputs, batch, Norms(3, 2))[0].item())
    assert losses[0] == pytest.approx(losses[1]) and losses[0] != pytest.approx(losses[2])
    assert estimators[0] == pytest.approx(estimators[1]) and estimators[0] != pytest.approx(estimators[2])


# -- running statistics and domains


def test_running_statistics_cover_all_steps_of_the_domain() -> None:
    pair = make_pair(Reinforce(norm_mean_type="running", norm_std_type="running", std_eps=0.0))
    steps = [([1.0, 3.0, 100.0], [0, 1, 2]), ([8.0, 50.0], [3, 4])]
    domains = [{"a": [0, 1], "b": [2]}, {"a": [3], "b": [4]}]
    seen = []
    for (rewards, groups), names in zip(steps, domains, strict=True):
        batch, table = make_batch([[0, 1]] * len(rewards), rewards, groups)
        table = RewardTable(**{**vars(table), "domains": names})
        stats = advantages(pair, batch, table)
        # as merged from two ranks with equal results
        pair.take(pair.adapt({k: Stat(2 * s.total, 2 * s.count, s.low, s.high) for k, s in stats.items()}))
        seen.append(batch.advantages[batch.loss_mask].tolist())
    a = 1 / math.sqrt(2)  # a: 1, 3: mean 2, std sqrt(2); b: 100 alone has no spread
    assert seen[0] == pytest.approx([-a, a, 0.0])
    # a: 1, 3, 8: mean 4, std sqrt((9 + 1 + 16) / 2) = sqrt(13); b: 100, 50: mean 75, std sqrt(1250)
    assert seen[1] == pytest.approx([4 / math.sqrt(13), -25 / math.sqrt(1250)])
    batch, table = make_batch([[0, 1]], [6.0], [9])
    table = RewardTable(**{**vars(table), "domains": {"a": [9]}})
    stats = advantages(pair, batch, table)
    assert stats["domain/a/critic/running_mean"].total == pytest.approx(4.5), "1, 3, 8, 6"
    coefficients = pair.adapt(stats)
    assert coefficients["_reward_moments/count/b"] == 2, "a domain without prompts in a step keeps its statistics"


def test_batch_statistics_are_computed_per_domain() -> None:
    rewards = [3.0, 1.0, 30.0, 10.0]
    batch, table = make_batch([[0, 1]] * 4, rewards, [0, 1, 2, 3])
    config = Reinforce(norm_mean_type="batch", norm_std_type="batch", std_eps=0.0)
    advantages(make_pair(config), batch, RewardTable(**{**vars(table), "domains": {"x": [0, 1], "y": [2, 3]}}))
    a = 1 / math.sqrt(2)
    assert batch.advantages[batch.loss_mask].tolist() == pytest.approx([a, -a, a, -a])
    advantages(make_pair(config), batch, table)
    assert batch.advantages[batch.loss_mask].tolist() != pytest.approx([a, -a, a, -a])


def test_all_domains_can_be_normalised_together() -> None:
    batch, table = make_batch([[0, 1]] * 4, [3.0, 1.0, 30.0, 10.0], [0, 1, 2, 3])
    table = RewardTable(**{**vars(table), "domains": {"x": [0, 1], "y": [2, 3]}})
    advantages(make_pair(Reinforce(norm_mean_type="batch", norm_std_type="all", std_eps=0.0)), batch, table)
    std = math.sqrt((8**2 + 10**2 + 19**2 + 1**2) / 3)  # around the common mean, 11
    assert batch.advantages[batch.loss_mask].tolist() == pytest.approx([1 / std, -1 / std, 10 / std, -10 / std])


def test_whitened_token_rewards() -> None:
    batch, table = make_batch([[0, 1, 1], [0, 1]], [3.0, 0.0], [0, 1])
    make_pair(Reinforce(whiten_rewards=True)).estimator.assign(batch, table, identity)
    # token rewards 0, 3, 0: mean 1, unbiased variance (1 + 4 + 1) / 2 = 3; then summed from the end
    b = 1 / math.sqrt(3)
    torch.testing.assert_close(batch.returns, torch.tensor([0, b, 2 * b, 0, -b]))
