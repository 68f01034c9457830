"""Turns of an expert within the policy's episodes: cross-entropy for them, advantages only for the policy's turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.algorithms.interface import Outputs, RewardTable
from hpcrl.algorithms.metrics import expert_stats
from hpcrl.algorithms.spec import GAE, GRPO, Reinforce, ReinforcePlusPlus
from hpcrl.algorithms.token_losses import fill_weights
from hpcrl.config import PolicyLoss, parse
from hpcrl.config.loss_weights import LossWeights
from hpcrl.metrics.stats import flatten
from hpcrl.rollout.batch import Batch, Norms, batch_from_samples, on_policy
from hpcrl.rollout.types import Sample
from tests.algorithms.pairs import make_pair
from tests.algorithms.test_invariance import (
    ALL,
    CREDITS,
    LAYOUTS,
    by_sample,
    rows_of,
    together,
    whole_norms,
)
from tests.algorithms.test_token_losses import OTHERS, losses

CONFIG = parse(
    {
        "pipeline": "agentic",
        "env": {"default": {"name": "frozen_lake"}},
        "imitation": {"expert_turns": 0.5, "ce": 0.5},
    }
)
POLICY, EXPERT, SHOWN = "pes"
EPISODES = {"spp" + "see" + "sp": 2.0, "sp": 0.0}
"""Policy, expert, policy, and an episode of one turn; with their rewards."""


def episodes() -> Batch:
    """Log-probs are -1, -2, ... by token, the generator's equal the trainer's; an expert's tokens have none."""
    samples = []
    for number, (text, reward) in enumerate(EPISODES.items()):
        kinds = np.array([*text])
        mask = kinds != SHOWN
        turns = np.cumsum(mask & ~np.concatenate([[False], mask[:-1]])) - 1
        drawn = kinds == POLICY
        samples.append(
            Sample(
                id=number, token_ids=np.arange(len(text), dtype=np.int32), loss_mask=mask,
                turn_ids=turns.astype(np.int32), versions=np.where(drawn, 3, -1).astype(np.int32), reward=reward,
                gen_logprobs=np.where(drawn, -1.0 - np.arange(len(text)), 0).astype(np.float32), score=reward,
            )
        )  # fmt: skip
    batch = batch_from_samples(samples, [1, 1])
    counts = torch.cat([-1.0 - torch.arange(len(text)) for text in EPISODES])
    batch.old_logprobs = torch.where(batch.loss_mask, counts, 0.0)
    batch.on_policy = on_policy(batch, 3, recomputed=False)
    return batch.check()


def assigned(section: PolicyLoss, batch: Batch) -> Batch:
    estimator = make_pair(section).estimator
    assert estimator is not None
    estimator.assign(batch, RewardTable.of(batch), lambda x: x)
    fill_weights(CONFIG, batch, {})
    return batch


def trained(batch: Batch, name: str) -> list[float]:
    values: list[float] = getattr(batch, name)[batch.loss_mask].tolist()
    assert not getattr(batch, name)[~batch.loss_mask].any()
    return values


def test_an_episode_of_policy_expert_and_policy_has_these_weights_and_this_gradient() -> None:
    """The rewards 2 and 0 minus their mean are 1 and -1; the denominator is the 6 trained tokens."""
    batch = assigned(GRPO(std_normalize=False, surrogate="vanilla"), episodes())
    assert trained(batch, "advantages") == [1, 1, 0, 0, 1, -1]
    assert trained(batch, "policy_weights") == [1, 1, 0, 0, 1, 1]
    assert trained(batch, "ce_weights") == [0, 0, 0.5, 0.5, 0, 0]
    assert batch.divergence_weights is None
    assert batch.old_logprobs is not None
    logprobs = batch.old_logprobs.clone().requires_grad_()
    section = GRPO(std_normalize=False, surrogate="vanilla")
    loss, stats = make_pair(section).objective.loss(Outputs(logprobs), batch, Norms(6.0, 2.0))
    loss.backward()
    assert logprobs.grad is not None
    found = (6 * logprobs.grad[batch.loss_mask]).tolist()
    assert found == pytest.approx([-1, -1, -0.5, -0.5, -1, 1])
    assert stats["loss/ce"].total == pytest.approx(0.5 * (5 + 6)), "the expert's tokens have log-probs -5 and -6"


def test_ratios_and_comparisons_with_the_generator_leave_the_expert_out() -> None:
    """Its tokens have log-prob 0 for the generator, so any of them would show."""
    section = GRPO(num_mini_batches=2, correction="truncate", correction_level="sequence", correction_normalize=True)
    batch = assigned(section, episodes())
    objective = make_pair(section).objective
    stats = objective.prepare(batch, lambda x: x)
    assert batch.old_logprobs is not None and batch.on_policy is not None
    stats |= objective.loss(Outputs(batch.old_logprobs.clone().requires_grad_()), batch, Norms(6.0, 2.0))[1]
    for name in ("actor/ratio_mean", "actor/train_infer_ratio_token_mean", "actor/correction_mean"):
        assert (stats[name].total, stats[name].count) == (4, 4)
    assert stats["actor/correction_norm"].total == 1
    assert stats["mismatch/diff/*"].high == stats["mismatch/kl_k3"].total == stats["actor/approxkl"].total == 0
    assert stats["mismatch/token_ratio"].count == stats["mismatch/token_ratio"].total == 4
    assert stats["actor/train_infer_ratio_sequence_mean"].total == 2
    assert batch.on_policy.tolist() == (batch.versions >= 0).tolist(), "an expert's turn makes no row off-policy"


def test_returns_pass_through_an_experts_turn() -> None:
    batch = assigned(Reinforce(gamma=0.5, norm_mean_type=None, norm_std_type=None), episodes())
    assert trained(batch, "returns") == [0.125, 0.25, 0.5, 1, 2, 0]
    assert trained(batch, "advantages") == [0.125, 0.25, 0, 0, 2, 0]


def test_whitening_and_the_kl_in_the_reward_leave_the_expert_out() -> None:
    section = ReinforcePlusPlus(kl_reward_coef=0.1)
    advantages = []
    for gap in (0.0, 50.0):
        batch = episodes()
        assert batch.old_logprobs is not None
        batch.ref_logprobs = torch.where(batch.versions < 0, batch.old_logprobs - gap, batch.old_logprobs)
        advantages.append(trained(assigned(section, batch), "advantages"))
    assert advantages[0] == advantages[1]
    drawn = torch.tensor(advantages[0])[[0, 1, 4, 5]]
    assert drawn.mean().item() == pytest.approx(0, abs=1e-6) and drawn.std().item() == pytest.approx(1, abs=1e-4)


def test_values_before_an_experts_tokens_are_learned() -> None:
    """The critic judges all states of the episode; with lambd=1 a token's target is the episode's reward."""
    batch = episodes()
    batch.values = 0.1 * batch.loss_mask
    batch = assigned(GAE(gamma=1.0, lambd=1.0, whiten_advantages=False), batch)
    assert trained(batch, "returns") == pytest.approx([2, 2, 2, 2, 2, 0])
    assert trained(batch, "advantages") == pytest.approx([1.9, 1.9, 0, 0, 1.9, -0.1])


def test_shares_of_the_expert_are_counted() -> None:
    assert flatten(expert_stats(episodes())) == pytest.approx(
        {
            "imitation/expert_turns": 1 / 4,
            "imitation/expert_tokens": 2 / 6,
            "imitation/expert_episodes": 1 / 2,
            "imitation/reward_with_expert": 2.0,
            "imitation/reward_without_expert": 0.0,
        }
    )


def test_rewards_with_and_without_an_expert_leave_failed_episodes_out() -> None:
    batch = episodes()
    batch.failed = torch.tensor([False, True])
    stats = expert_stats(batch)
    assert (stats["imitation/reward_with_expert"].total, stats["imitation/reward_with_expert"].count) == (2, 1)
    assert stats["imitation/reward_without_expert"].count == 0
    batch.failed = ~batch.failed
    assert expert_stats(batch)["imitation/reward_with_expert"].count == 0


def test_without_a_policy_loss_only_the_experts_tokens_are_learned() -> None:
    """Also a step in which the expert played no turn has a loss, of which nothing is learned."""
    config = CONFIG.model_copy(update={"loss": {"default": LossWeights(policy=0)}})
    section = GRPO(std_normalize=False, surrogate="vanilla")
    for rows, wanted in (([0, 1], [0, 0, -0.5, -0.5, 0, 0]), ([1], [0])):
        batch = assigned(section, episodes()).select(rows)
        fill_weights(config, batch, {})
        assert batch.old_logprobs is not None
        logprobs = batch.old_logprobs.clone().requires_grad_()
        make_pair(section).objective.loss(Outputs(logprobs), batch, Norms(6.0, 2.0))[0].backward()
        assert logprobs.grad is not None
        assert (6 * logprobs.grad[batch.loss_mask]).tolist() == pytest.approx(wanted)


def test_rollouts_with_an_expert_are_refused_by_a_run_without() -> None:
    with pytest.raises(ValueError, match=r"^imitation.expert_turns: 0, but the rollouts have 2 tokens of an expert's"):
        fill_weights(parse({}), episodes(), {})


# -- any split


def with_expert(rows: list[int], longer: int = 0) -> Batch:
    """Rows whose second turns are an expert's."""
    batch = rows_of(rows, longer)
    expert = batch.loss_mask & (batch.turn_ids == 1)
    batch.versions, batch.gen_logprobs = batch.versions.masked_fill(expert, -1), batch.gen_logprobs * ~expert
    return batch


@pytest.mark.parametrize("section", CREDITS, ids=lambda section: type(section).__name__)
def test_advantages_do_not_depend_on_the_split(section: Any) -> None:
    section = section.model_copy(update={"whiten_advantages": True})
    table = RewardTable.of(rows_of(ALL))

    def found(parts: list[Batch]) -> dict[int, torch.Tensor]:
        together(parts, lambda part, all_sum: make_pair(section).estimator.assign(part, table, all_sum))  # type: ignore[union-attr]
        return {sample: values for part in parts for sample, values in by_sample(part, "advantages").items()}

    batch = with_expert(ALL)
    whole = found([batch])
    assert batch.advantages is not None and not batch.advantages[batch.versions < 0].any()
    for longer, parts in LAYOUTS.values():
        for sample, values in found([with_expert(part, longer) for part in parts]).items():
            torch.testing.assert_close(values, whole[sample], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_losses_do_not_depend_on_the_split(aggregation: Any) -> None:
    section = GRPO(**OTHERS, surrogate="kl_cov", cov_share=0.2, loss_aggregation=aggregation)

    def filled(rows: list[int], longer: int = 0) -> Batch:
        batch = with_expert(rows, longer)
        fill_weights(CONFIG, batch, {})
        return batch

    loss, gradients, stats = losses(section, None, [filled(ALL)], whole_norms())
    assert stats["loss/ce"] != 0
    for longer, parts in LAYOUTS.values():
        other, others, more = losses(section, None, [filled(part, longer) for part in parts], whole_norms())
        torch.testing.assert_close(other, loss, rtol=1e-5, atol=1e-6)
        for sample, gradient in gradients.items():
            torch.testing.assert_close(others[sample], gradient, rtol=1e-5, atol=1e-6)
        assert more == pytest.approx(stats, rel=1e-5, abs=1e-6)
