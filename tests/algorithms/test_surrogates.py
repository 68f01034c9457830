"""Surrogates, advantages and weights of responses: each against a plain reading of its formula, and by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.algorithms.interface import Outputs
from hpcrl.algorithms.spec import GRPO, RLOO, RaftPlusPlus, Reinforce
from hpcrl.algorithms.surrogates import SURROGATES
from hpcrl.config import PolicyLoss, load
from hpcrl.config.foreign_keys import FOREIGN
from hpcrl.config.reading import known_keys
from hpcrl.metrics.stats import flatten
from hpcrl.rollout.batch import Norms
from hpcrl.spec.policy_loss import SURROGATE_KEYS
from hpcrl.spec.problems import dotted
from hpcrl.spec.tables import ENVS, REWARDS
from tests.algorithms.pairs import make_pair
from tests.algorithms.test_algorithms import advantages, make_batch, norms_of

MASKS = [[0, 1, 1], [0, 0, 1, 0, 1, 1], [0, 1], [0, 0, 0], [0, 1, 1, 1, 1], [0, 1, 0, 0, 1]]
ADVANTAGES = [0.7, -1.3, 0.0, 2.0, -0.4, 1.1]
SHIFTS = [0.12, -0.12, 0.1, 0.0, 0.4, 0.5]
LEVELS = ("token", "turn", "geometric", "sequence")


def moved(batch: Any) -> Tensor:
    """Log-probs [T] of a policy that has moved from the old one, differently for each response and token."""
    return batch.old_logprobs + torch.tensor(SHIFTS)[batch.row_ids] + torch.cos(torch.arange(batch.num_tokens)) * 0.05


def clip(value: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(torch.maximum(value, torch.tensor(low)), torch.tensor(high))


def formula(config: Any, rho: Tensor, logprob: Tensor, delta: Tensor, a: float) -> Tensor:
    """The loss of a token or a response from its ratio rho, its log-prob and the difference to the old log-prob."""
    low, high = 1 - config.pg_clip_low, 1 + config.pg_clip_high
    match config.surrogate:
        case "ppo":
            gain = torch.minimum(rho * a, clip(rho, low, high) * a)
            return -(torch.clamp(gain, min=config.dual_clip * a) if config.dual_clip and a < 0 else gain)
        case "cispo":
            return -clip(rho.detach(), low, high) * a * logprob
        case "topr":
            return -(1.0 if a >= 0 else min(1.0, rho.item())) * a * logprob
        case "sapo":
            tau = config.sapo_tau_positive if a > 0 else config.sapo_tau_negative
            return -4 / tau / (1 + (-tau * (rho - 1)).exp()) * a
        case "kimi":
            return -a * logprob + config.kimi_tau / 2 * delta**2
        case "vanilla":
            return -a * logprob
    raise AssertionError(config.surrogate)


def plain_loss(config: Any, batch: Any, logprobs: Tensor) -> Tensor:
    """Sum of token losses over all responses, or of response losses where the ratio belongs to a whole response. With
    the geometric ratio the mean over a response, since its log-prob is a mean too."""
    total = torch.zeros(())
    for row in range(batch.num_sequences):
        tokens = [t for t in range(batch.num_tokens) if batch.row_ids[t] == row and batch.loss_mask[t]]
        if not tokens:
            continue
        lp, old = logprobs[tokens], batch.old_logprobs[tokens]
        a = batch.advantages[tokens[0]].item()
        if config.ratio_level == "token":
            for one, before in zip(lp, old, strict=True):
                total = total + formula(config, (one - before).exp(), one, one - before, a)
        elif config.ratio_level == "turn":  # as often as the turn has tokens
            turns = batch.turn_ids[tokens]
            for turn in turns.unique():
                delta, mean = (lp - old)[turns == turn].mean(), lp[turns == turn].mean()
                total = total + (turns == turn).sum() * formula(config, delta.exp(), mean, delta, a)
        elif config.ratio_level == "sequence":
            total = total + formula(config, (lp - old).sum().exp(), lp.sum(), (lp - old).sum(), a)
        else:
            total = total + formula(config, (lp - old).mean().exp(), lp.mean(), (lp - old).mean(), a)
    return total / norms_of(batch).sequences


OF_THEIR_OWN = {"gmpo", "dppo", "clip_cov", "kl_cov"}
"""Surrogates with test files of their own."""
CONFIGS = [
    Reinforce(
        surrogate=name, ratio_level=level, pg_clip_low=0.15, pg_clip_high=0.3, kimi_tau=0.6, sapo_tau_positive=0.7
    )
    for name in sorted(SURROGATES.keys() - OF_THEIR_OWN)
    for level in (LEVELS if "ratio_level" in SURROGATE_KEYS[name] else ("token",))
] + [Reinforce(dual_clip=1.2), Reinforce(dual_clip=1.1, ratio_level="geometric")]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.surrogate}-{c.ratio_level}-{c.dual_clip}")
def test_gradients_match_the_formula(config: Any) -> None:
    batch, _ = make_batch(MASKS, [0.0] * 6, [0] * 6)
    starts = [[int(m > before) for before, m in zip([0, *mask], mask, strict=False)] for mask in MASKS]
    batch.turn_ids = torch.cat([torch.tensor(row).cumsum(0) - 1 for row in starts]).int()
    assert int(batch.turn_ids.max()) == 1, "some rows have two turns"
    batch.advantages = torch.tensor(ADVANTAGES)[batch.row_ids] * batch.loss_mask
    mode = "seq-mean-token-mean" if config.ratio_level == "geometric" else "seq-mean-token-sum"
    config = config.model_copy(update={"loss_aggregation": mode, "num_mini_batches": 2})
    logprobs, other = (moved(batch).requires_grad_() for _ in range(2))
    loss, stats = make_pair(config).objective.loss(Outputs(logprobs), batch, norms_of(batch))
    loss.backward()
    plain_loss(config, batch, other).backward()
    wanted = other.grad
    torch.testing.assert_close(logprobs.grad, wanted, rtol=1e-4, atol=1e-6)
    clipped = flatten(stats)["actor/clipfrac"]
    assert (0 < clipped < 1) == (config.surrogate in ("ppo", "cispo", "topr"))
    # A different constant or old policy is noticed.
    batch.old_logprobs = batch.old_logprobs + 0.6
    again = logprobs.detach().requires_grad_()
    make_pair(config).objective.loss(Outputs(again), batch, norms_of(batch))[0].backward()
    assert config.surrogate == "vanilla" or not torch.allclose(again.grad, wanted, rtol=1e-3)


def test_declared_keys_of_a_surrogate_are_the_keys_that_change_it() -> None:
    assert SURROGATES.keys() == SURROGATE_KEYS.keys() == set(PolicyLoss.model_fields["surrogate"].annotation.__args__)
    changes = {
        "cov_share": 0.5,
        "cov_low": 0.1,
        "cov_high": -0.1,
        "cov_kl_coef": 2.0,
        "dppo_divergence": "kl",
        "dppo_ratio_max": 1.01,
        "ratio_to": "generator",
        "ratio_level": "sequence",
        "pg_clip_low": 0.05,
        "pg_clip_high": 0.05,
        "dual_clip": 1.05,
        "sapo_tau_positive": 3.0,
        "sapo_tau_negative": 3.0,
        "kimi_tau": 3.0,
    }
    assert changes.keys() == set().union(*SURROGATE_KEYS.values())
    batch, _ = make_batch(MASKS, [0.0] * 6, [0] * 6)
    batch.advantages = torch.tensor(ADVANTAGES)[batch.row_ids] * batch.loss_mask

    def gradient(**keys: Any) -> Tensor:
        bounds = {"pg_clip_low": 0.1} if keys["surrogate"] == "dppo" else {}  # of a divergence
        config = Reinforce(num_mini_batches=2, **({"cov_low": -1.0, "cov_share": 0.4} | bounds | keys))
        logprobs, objective = moved(batch).requires_grad_(), make_pair(config).objective
        objective.prepare(batch, lambda tensor: tensor)
        objective.loss(Outputs(logprobs), batch, norms_of(batch))[0].backward()
        assert logprobs.grad is not None
        return logprobs.grad

    for name, keys in SURROGATE_KEYS.items():
        before = gradient(surrogate=name)
        for key, value in changes.items():
            same = torch.equal(before, gradient(surrogate=name, **{key: value}))
            assert same == (key not in keys), (name, key)


def test_constant_aggregation_divides_by_a_constant() -> None:
    batch, _ = make_batch([[0, 1, 1, 1], [0, 1]], [0.0, 0.0], [0, 1])
    batch.advantages = torch.tensor([0, 2.0, 2.0, 2.0, 0, -1.0])
    config = GRPO(loss_aggregation="seq-mean-token-sum-norm", loss_norm_tokens=8, surrogate="vanilla")
    logprobs = torch.tensor([0, -1.0, -2.0, -3.0, 0, -4.0])
    loss, _ = make_pair(config).objective.loss(Outputs(logprobs), batch, Norms(4.0, 2.0))
    assert loss.item() == pytest.approx((2 * 6 - 4) / 8 / 2)


# -- advantage estimators


def test_rloo_by_hand() -> None:
    batch, table = make_batch([[0, 1, 1]] + [[0, 1]] * 4, [1.0, 0.0, 0.5, 4.0, 7.0], [3, 3, 3, 8, 9])
    advantages(make_pair(RLOO()), batch, table)
    assert batch.advantages.tolist() == pytest.approx([0, 0.75, 0.75, 0, -0.75, 0, 0, 0, 0, 0, 0])


def test_raft_plus_plus_learns_only_from_positive_rewards() -> None:
    batch, table = make_batch([[0, 1]] * 4, [1.0, 0.0, -2.0, 0.5], [0, 0, 1, 1])
    flat = flatten(advantages(make_pair(RaftPlusPlus()), batch, table))
    assert batch.weights.tolist() == [1, 0, 0, 1] and batch.advantages[1::2].tolist() == [1.0, 0, 0, 0.5]
    assert flat["actor/positive_ratio"] == 0.5
    batch, table = make_batch([[0, 1]] * 4, [1.0, 0.0, -2.0, 0.5], [0, 0, 1, 1])
    advantages(make_pair(RaftPlusPlus(positive_above=0.5)), batch, table)
    assert batch.weights.tolist() == [1, 0, 0, 0]


# -- weights of responses


def weighed(rewards: list[float], groups: list[int], lengths: list[int], **keys: Any) -> tuple[list[float], Any]:
    """The weights of responses of these lengths, and statistics. The first one was truncated."""
    batch, table = make_batch([[0] + [1] * length for length in lengths], rewards, groups)
    flat = flatten(advantages(make_pair(GRPO(**keys)), batch, table))
    part, _ = make_batch([[0] + [1] * length for length in lengths], rewards, groups)
    part = part.select([2, 0])
    make_pair(GRPO(**keys)).estimator.assign(part, table, lambda tensor: tensor)
    assert part.weights.tolist() == batch.weights[[2, 0]].tolist(), "another rank's rows have the weights of the step"
    return batch.weights.tolist(), flat


def test_masks_by_hand() -> None:
    rewards, groups, lengths = [1.0, 0.0, 1.0, 1.0, 0.0], [0, 0, 1, 1, 2], [2, 3, 4, 1, 5]
    weights, flat = weighed(rewards, groups, lengths, max_len_mask=True)
    assert weights == [0, 1, 1, 1, 1] and flat["actor/max_len_mask_ratio"] == flat["actor/final_mask_ratio"] == 0.8
    weights, flat = weighed(rewards, groups, lengths, difficulty_mask=True)
    assert weights == [1, 1, 0, 0, 0] and flat["actor/difficulty_mask_ratio"] == 0.4
    weights, flat = weighed(rewards, groups, lengths, error_max_len_clip=3)
    assert weights == [1, 0, 1, 1, 0] and flat["actor/error_len_mask_ratio"] == 0.6
    weights, flat = weighed(rewards, groups, lengths, max_len_mask=True, error_max_len_clip=4)
    assert weights == [0, 1, 1, 1, 0] and flat["actor/final_mask_ratio"] == 0.6
    weights, flat = weighed(rewards, groups, lengths)
    assert weights == [1] * 5 and not any(name.endswith("mask_ratio") for name in flat)
    keys = {"difficulty_mask": True, "difficulty_low_threshold": 0.6, "difficulty_loss_weight": True}
    weights, flat = weighed([1.0, 0.0, 0.0], [0, 0, 1], [2, 2, 2], **keys)
    assert weights == [0, 0, 0] and flat["actor/final_mask_ratio"] == 0.0


def test_weights_by_difficulty_and_length_by_hand() -> None:
    weights, _ = weighed([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], [2, 2, 2, 2], difficulty_loss_weight=True)
    assert weights == pytest.approx([w / 0.875 for w in (1.25, 1.25, 0.5, 0.5)])
    weights, _ = weighed([1.0, 0.0, 1.0], [0, 0, 1], [1, 3, 5], length_loss_weight=True)
    assert weights == pytest.approx([1.5, 1.0, 0.5])
    weights, _ = weighed([1.0, 0.0, 1.0], [0, 0, 1], [1, 3, 5], length_loss_weight=True, max_len_mask=True)
    assert weights == pytest.approx([0, 1.0 / 0.75, 0.5 / 0.75])
    assert not math.isnan(sum(weighed([1.0, 0.0, 1.0], [0, 0, 1], [3, 3, 3], length_loss_weight=True)[0]))


# -- the configuration


def test_names_from_other_libraries_lead_to_existing_keys() -> None:
    known = {dotted(tuple("NAME" if part == "*" else part for part in key)) for key in known_keys()}
    for kind, table in {"reward": REWARDS, "env": ENVS}.items():
        sections = [spec.section for _, spec in table.items() if spec.section is not None]
        known |= {f"{kind}.NAME.options.{key}" for section in sections for key in section.model_fields}
    assert not FOREIGN.keys() & {key.rsplit(".", 1)[-1] for key in known}, "what hpcrl knows needs no translation"
    for name, text in FOREIGN.items():
        keys = [word.strip(",;") for word in text.replace("(", " ").split() if "." in word or "_" in word]
        assert keys and all(key in known for key in keys), (name, keys)


RECIPES = {
    "dapo": {"advantage_estimator": "grpo", "pg_clip_high": 0.28, "loss_aggregation": "token-mean"},
    "dr_grpo": {"advantage_estimator": "grpo", "std_normalize": False, "loss_norm_tokens": 48},
    "gspo": {"advantage_estimator": "grpo", "ratio_level": "geometric", "pg_clip_low": 3e-4, "pg_clip_high": 4e-4},
    "cispo": {"surrogate": "cispo"},
    "topr": {"surrogate": "topr"},
    "sapo": {"surrogate": "sapo", "loss_aggregation": "seq-mean-token-mean"},
    "kimi": {"surrogate": "kimi", "ratio_level": "sequence"},
    "lite_ppo": {"advantage_estimator": "reinforce", "norm_mean_type": "group", "norm_std_type": "batch"},
    "reinforce_plus_plus_baseline": {"norm_mean_type": "group", "whiten_advantages": True},
    "gmpo": {"surrogate": "gmpo", "pg_clip_low": 0.4, "loss_aggregation": "seq-mean-token-mean"},
    "dppo": {"surrogate": "dppo", "pg_clip_high": 0.15},
    "clip_cov": {"surrogate": "clip_cov", "pg_clip_high": 0.2},
    "kl_cov": {"surrogate": "kl_cov", "cov_kl_coef": 1.0},
    "rloo": {"advantage_estimator": "rloo"},
    "raft_plus_plus": {"advantage_estimator": "raft_plus_plus", "loss_aggregation": "seq-mean-token-mean"},
}


@pytest.mark.parametrize("name", RECIPES)
def test_presets_have_the_keys_of_their_algorithm(name: str) -> None:
    config = load(["+experiment=demo", f"algorithm={name}", "rollout.max_new_tokens=48"])
    for key, value in RECIPES[name].items():
        assert getattr(config.algorithm, key) == value
    assert config.rollout.filter_std
