"""The algorithms on packed batches: goldens and a naive loop."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hpcrl.algorithms import factory
from hpcrl.algorithms.cross_entropy import CrossEntropy
from hpcrl.algorithms.factory import make_algorithm
from hpcrl.algorithms.interface import Algorithm, Outputs, RewardTable
from hpcrl.algorithms.metrics import advantage_stats, batch_stats, domain_stats
from hpcrl.algorithms.spec import GRPO, Reinforce, ReinforcePlusPlus
from hpcrl.config import PolicyLoss, parse
from hpcrl.metrics.stats import flatten, merge
from hpcrl.rollout.batch import Norms, batch_from_samples
from hpcrl.rollout.types import FinishReason, Sample
from hpcrl.spec.tables import ALGORITHMS
from tests.algorithms.pairs import make_pair


def identity(tensor):
    return tensor


def make_batch(masks, rewards, group_ids, seed=0):
    """One row per mask; a mask's leading zeros are its prompt, each stretch of ones a turn. Log-probs are random."""
    rng = np.random.default_rng(seed)
    samples = []
    for i, mask in enumerate(masks):
        mask, size = np.array(mask, dtype=bool), len(mask)
        turns = np.cumsum(np.diff(mask, prepend=False) & mask).astype(np.int32) - 1
        samples.append(
            Sample(
                id=10 * i, token_ids=np.arange(size, dtype=np.int32), loss_mask=mask, turn_ids=turns,
                gen_logprobs=np.where(mask, -rng.random(size), 0).astype(np.float32),
                versions=np.where(mask, 3, -1).astype(np.int32), reward=rewards[i], score=rewards[i],
                finish_reason=FinishReason.LENGTH if i == 0 else FinishReason.STOP,
            )
        )  # fmt: skip
    batch = batch_from_samples(samples, group_ids)
    batch.old_logprobs = torch.from_numpy(np.where(batch.loss_mask, -rng.random(batch.num_tokens), 0)).float()
    batch.ref_logprobs = torch.from_numpy(np.where(batch.loss_mask, -rng.random(batch.num_tokens), 0)).float()
    return batch.check(), RewardTable.of(batch)


def advantages(algorithm: Algorithm, batch, table):
    """Fill the advantages as a trainer role does; returns what it logs."""
    own = algorithm.estimator.assign(batch, table, identity)
    return batch_stats(batch, table) | advantage_stats(batch) | own


def norms_of(batch):
    tokens = (batch.loss_mask * batch.weights[batch.row_ids]).sum().item()
    has_tokens = [bool(batch.loss_mask[batch.row_ids == row].any()) for row in range(batch.num_sequences)]
    return Norms(tokens, (batch.weights * torch.tensor(has_tokens)).sum().item())


def mixed_batch(seed=0):
    """Groups of unequal size, turns of an environment, a row without a model token, weights 0, 1 and 2."""
    masks = [[0, 1, 1], [0, 0, 1, 0, 1, 1], [0, 1], [0, 0, 0], [0, 1, 1, 1, 1], [0, 1, 0, 0, 1], [0, 0, 1, 1]]
    batch, table = make_batch(masks, [1.0, 0.0, 2.0, 5.0, 0.5, 1.0, 3.0], [1, 1, 1, 1, 2, 2, 3], seed)
    batch.weights = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    return batch, table


# -- advantages


def test_grpo_advantages_are_set_at_the_model_tokens():
    batch, table = make_batch([[0, 1, 1], [0, 0, 1, 0, 1], [0, 1], [0, 1]], [1.0, 0.0, 3.0, 3.0], [4, 4, 9, 9])
    stats = advantages(make_pair(GRPO(std_eps=0.0)), batch, table)
    a = 1 / math.sqrt(2)  # (1 - .5) / sqrt(.5), sample std of (1, 0)
    expected = torch.tensor([0, a, a, 0, 0, -a, 0, -a, 0, 0, 0, 0])
    torch.testing.assert_close(batch.advantages, expected)
    torch.testing.assert_close(batch.returns, expected)
    batch.check()
    flat = flatten(stats)
    assert flat["critic/rewards/mean"] == 1.75 and flat["critic/score/max"] == 3.0
    assert flat["critic/advantages/max"] == pytest.approx(a) and flat["critic/returns/min"] == pytest.approx(-a)
    assert flat["critic/advantages/mean"] == pytest.approx(0.0)
    assert (flat["token/prompt_length/mean"], flat["token/response_length/mean"]) == (1.25, 1.75)
    assert (flat["token/total_length/max"], flat["token/response_length/clip_ratio"]) == (5.0, 0.25)
    assert (flat["group/all_correct_ratio"], flat["group/all_incorrect_ratio"]) == (0.5, 0.0)
    assert flat["group/mixed_ratio"] == 0.5 and flat["actor/valid_sample_ratio"] == 1.0


def test_dr_grpo_does_not_divide_by_the_deviation():
    batch, table = make_batch([[0, 1], [0, 1]], [1.0, 0.0], [4, 4])
    advantages(make_pair(GRPO(std_normalize=False)), batch, table)
    assert batch.advantages.tolist() == [0.0, 0.5, 0.0, -0.5]


def test_group_statistics_come_from_the_reward_table_not_from_local_rows():
    batch, table = make_batch([[0, 1], [0, 1], [0, 1]], [1.0, 0.0, 5.0], [4, 4, 4])
    part = batch.select([2, 0])
    advantages(make_pair(GRPO(std_normalize=False)), part, table)
    assert part.advantages.tolist() == [0.0, 3.0, 0.0, -1.0]
    empty = batch.select([])
    advantages(make_pair(GRPO()), empty, table)
    assert empty.advantages.numel() == 0


def test_reinforce_plus_plus_whitens_token_returns():
    batch, table = make_batch([[0, 1, 1], [0, 1]], [3.0, 1.0], [0, 1])
    stats = advantages(make_pair(ReinforcePlusPlus()), batch, table)
    # token returns 3, 3, 1: mean 7 / 3, unbiased variance (2 (2/3)^2 + (4/3)^2) / 2 = 4 / 3
    b = 1 / math.sqrt(3)
    torch.testing.assert_close(batch.advantages, torch.tensor([0, b, b, 0, -2 * b]))
    assert batch.returns.tolist() == [0, 3, 3, 0, 1] and flatten(stats)["critic/returns/max"] == 3
    advantages(make_pair(ReinforcePlusPlus(gamma=0.5, whiten_advantages=False)), batch, table)
    assert batch.advantages.tolist() == [0, 1.5, 3, 0, 1]


def test_reinforce_discounts_over_model_tokens():
    batch, table = make_batch([[0, 1, 0, 1], [0, 1, 1]], [8.0, 4.0], [0, 0])
    advantages(make_pair(Reinforce(gamma=0.5)), batch, table)
    assert batch.advantages.tolist() == [0.0, 4.0, 0.0, 8.0, 0.0, 2.0, 4.0]
    advantages(make_pair(Reinforce(norm_mean_type="batch")), batch, table)
    assert batch.advantages.tolist() == [0.0, 2.0, 0.0, 2.0, 0.0, -2.0, -2.0]


def test_kl_in_the_reward_and_clipping_by_hand():
    batch, table = make_batch([[0, 1, 1]], [8.0], [0])
    batch.old_logprobs, batch.ref_logprobs = torch.tensor([0.0, -1.0, -2.0]), torch.tensor([0.0, -3.0, -1.0])
    config = Reinforce(kl_reward_coef=0.5, reward_clip=5.0)
    advantages(make_pair(config), batch, table)
    # token rewards: -.5 x 2 = -1, then min(8, 5) + .5 x 1 = 5.5: only the reward is clipped
    assert batch.returns.tolist() == [0.0, 4.5, 5.5]
    advantages(make_pair(config.model_copy(update={"advantage_clip": 4.5})), batch, table)
    assert batch.returns.tolist() == [0.0, 4.5, 5.5] and batch.advantages.tolist() == [0.0, 4.5, 4.5]


def test_whitened_advantages_have_mean_0_and_variance_1_over_model_tokens():
    batch, table = mixed_batch()
    advantages(make_pair(Reinforce(whiten_advantages=True)), batch, table)
    counted = batch.advantages[batch.loss_mask & (batch.weights[batch.row_ids] > 0)]
    assert counted.mean().item() == pytest.approx(0, abs=1e-6) and counted.var().item() == pytest.approx(1, abs=1e-4)
    assert batch.advantages[~batch.loss_mask].abs().sum() == 0


# -- losses

CONFIGS = [
    GRPO(),
    GRPO(loss_aggregation="seq-mean-token-sum", dual_clip=1.5, pg_clip_high=0.28),
    GRPO(loss_aggregation="seq-mean-token-mean", kl_loss_coef=0.3, kl_loss_estimator="k3", entropy_loss_coef=0.1),
    ReinforcePlusPlus(kl_loss_coef=0.2, kl_loss_estimator="abs", kl_reward_coef=0.1, num_mini_batches=2),
    GRPO(correction="truncate", correction_high=1.1, kl_loss_coef=0.3),
    GRPO(correction="mask", correction_level="geometric", correction_low=0.8, correction_high=1.1),
    ReinforcePlusPlus(correction="truncate", correction_level="sequence"),
    GRPO(correction="reject", correction_low=0.6, correction_high=1.5),
    Reinforce(norm_mean_type="group", norm_std_type="batch", gamma=0.9, entropy_loss_coef=-0.1, reward_clip=1.0),
]


def forward(batch, theta):
    """Log-probs and entropies that depend on three shared parameters and every token."""
    position = batch.position_ids.float()
    shift = theta[0] * torch.sin(position + batch.sample_ids[batch.row_ids]) + theta[1]
    return batch.old_logprobs + shift, torch.cos(position) * theta[2] + 1.0


def loss_and_gradient(algorithm, batch, micro_batches):
    theta = torch.tensor([0.4, 0.1, 0.7], requires_grad=True)
    norms, parts = norms_of(batch), []
    total = 0.0
    for rows in micro_batches:
        micro_batch = batch.select(rows)
        loss, stats = algorithm.objective.loss(Outputs(*forward(micro_batch, theta)), micro_batch, norms)
        (loss + 0.0 * theta.sum()).backward()
        total += loss.item()
        parts.append(stats)
    return total, theta.grad, flatten(merge(parts))


def naive_weight(config: PolicyLoss, gaps, t) -> float:
    if config.correction == "none":
        return 1.0
    total = sum(gaps.values())
    if config.correction == "reject":  # by token
        return float(all(config.correction_low <= math.exp(g) <= config.correction_high for g in gaps.values()))
    weight = math.exp({"token": gaps[t], "sequence": total, "geometric": total / len(gaps)}[config.correction_level])
    if config.correction == "truncate":
        return min(weight, config.correction_high)
    return weight if config.correction_low <= weight <= config.correction_high else 0.0


def naive_loss(config: PolicyLoss, batch, theta):
    """Token by token in plain Python."""
    norms = norms_of(batch)
    logprobs, entropy = forward(batch, theta)
    total = torch.zeros(())
    for row in range(batch.num_sequences):
        tokens = [t for t in range(batch.num_tokens) if batch.row_ids[t] == row and batch.loss_mask[t]]
        row_total = torch.zeros(())
        gaps = {t: (batch.old_logprobs[t] - batch.gen_logprobs[t]).item() for t in tokens}
        for t in tokens:
            a = batch.advantages[t].item()
            ratio = (logprobs[t] - batch.old_logprobs[t]).exp()
            clipped = min(max(ratio, 1 - config.pg_clip_low), 1 + config.pg_clip_high)
            loss = -min(ratio * a, clipped * a)
            if config.dual_clip and a < 0:
                loss = -max(min(ratio * a, clipped * a), config.dual_clip * a)
            loss = naive_weight(config, gaps, t) * loss
            delta = logprobs[t] - batch.ref_logprobs[t]
            kl = {"k2": 0.5 * delta**2, "k3": (-delta).exp() + delta - 1, "abs": delta.abs()}[config.kl_loss_estimator]
            row_total = row_total + loss + config.kl_loss_coef * kl - config.entropy_loss_coef * entropy[t]
        if tokens and config.loss_aggregation == "seq-mean-token-mean":
            row_total = row_total / len(tokens)
        total = total + batch.weights[row] * row_total
    return total / (norms.tokens if config.loss_aggregation == "token-mean" else norms.sequences)


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_loss_and_gradient_equal_a_naive_loop(config):
    batch, table = mixed_batch()
    algorithm = make_pair(config)
    advantages(algorithm, batch, table)
    loss, gradient, stats = loss_and_gradient(algorithm, batch, [range(7)])
    theta = torch.tensor([0.4, 0.1, 0.7], requires_grad=True)
    expected = naive_loss(config, batch, theta)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, theta.grad, rtol=1e-5, atol=1e-6)
    assert stats["actor/total_loss"] == pytest.approx(loss, rel=1e-5)


def test_metrics_of_the_loss_by_hand():
    batch, table = make_batch([[0, 1, 1], [0, 1]], [1.0, 0.0], [0, 0])
    algorithm = make_pair(GRPO(std_normalize=False, kl_loss_coef=0.1, num_mini_batches=2))
    advantages(algorithm, batch, table)  # .5, .5, -.5
    batch.old_logprobs = torch.log(torch.tensor([1.0, 0.5, 0.4, 1.0, 0.2]))
    batch.gen_logprobs = torch.log(torch.tensor([1.0, 0.4, 0.5, 1.0, 0.1]))
    batch.ref_logprobs = torch.log(torch.tensor([1.0, 0.5, 0.8, 1.0, 0.2]))
    logprobs = torch.log(torch.tensor([1.0, 0.75, 0.4, 1.0, 0.2])).requires_grad_()
    entropy = torch.tensor([9.0, 1.0, 2.0, 9.0, 3.0])
    loss, stats = algorithm.objective.loss(Outputs(logprobs, entropy), batch, Norms(3.0, 2.0))
    flat = flatten(stats)
    kl = (math.log(1.5) ** 2 + math.log(2) ** 2) / 2 / 3  # of the current policy; k2
    expected = {
        "actor/pg_loss": (-1.2 * 0.5 - 0.5 + 0.5) / 3,
        "actor/kl_loss": kl,
        "actor/total_loss": -0.2 + 0.1 * kl,
        "actor/approxkl": 0.5 * math.log(1.5) ** 2 / 3,
        "actor/ratio_mean": 3.5 / 3,
        "actor/clipfrac": 1 / 3,
        "critic/entropy/mean": 2.0,
        "critic/kl": (2 - math.log(2) - 1) / 3,  # of the policy before the step; k3
        "actor/train_infer_ratio_token_mean": (1.25 + 0.8 + 2) / 3,
        "actor/train_infer_diff_token_mean": (0.1 - 0.1 + 0.1) / 3,
        "actor/train_infer_ratio_geometric_mean": (1.0 + 2.0) / 2,
        "actor/train_infer_diff_geometric_mean": (0.0 + 0.1) / 2,
        "actor/train_infer_ratio_sequence_mean": (1.0 + 2.0) / 2,
        "actor/train_infer_diff_sequence_mean": (0.0 + 0.1) / 2,
    }
    assert flat == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert loss.item() == pytest.approx(expected["actor/total_loss"], rel=1e-5)
    loss.backward()
    assert logprobs.grad[[0, 3]].tolist() == [0.0, 0.0]


def test_mismatch_and_staleness_metrics_do_not_depend_on_the_split():
    masks = [[0, 1, 1], [0, 1], [0, 1], [0, 1]]
    batch, table = make_batch(masks, [1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1])
    algorithm = make_pair(GRPO())
    advantages(algorithm, batch, table)
    batch.old_logprobs = None
    train, gen = [1.0, 0.5, 0.4, 1.0, 0.25, 1.0, 0.9, 1.0, 0.3], [1.0, 0.4, 0.5, 1.0, 0.5, 1.0, 0.1, 1.0, 0.7]
    batch.gen_logprobs, logprobs = torch.log(torch.tensor(gen)), torch.log(torch.tensor(train))
    batch.weights = torch.tensor([2.0, 1.0, 1.0, 0.0])
    batch.on_policy = torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 1]) > 0  # row 2 is stale, row 3 has no weight

    def logged(parts):
        found = []
        for rows in parts:
            part = batch.select(rows)
            index = torch.cat([torch.arange(*batch.cu_seqlens[row : row + 2].tolist()) for row in rows])
            found.append(algorithm.objective.loss(Outputs(logprobs[index]), part, norms_of(batch))[1])
        groups = ("mismatch/", "stale/")
        return {name: value for name, value in flatten(merge(found)).items() if name.startswith(groups)}

    k1 = (2 * math.log(0.8) + 2 * math.log(1.25) + math.log(2)) / 5
    expected = {
        "mismatch/token_ratio": 5 / 6,
        "mismatch/diff/mean": (2 * 0.1 + 2 * 0.1 + 0.25) / 5,
        "mismatch/diff/max": 0.25,
        "mismatch/diff/min": 0.1,
        "mismatch/kl_k1": k1,
        "mismatch/kl_k3": (2 * 1.25 + 2 * 0.8 + 0.5) / 5 - 1 + k1,
        "stale/diff/mean": 0.8,
        "stale/diff/max": 0.8,
        "stale/diff/min": 0.8,
        "stale/kl_k1": math.log(1 / 9),
        "stale/kl_k3": 9 - math.log(9) - 1,
    }
    for parts in ([[0, 1, 2, 3]], [[2], [0], [3, 1]]):
        assert logged(parts) == pytest.approx(expected, rel=1e-5)
    batch.on_policy = None  # rollouts of another run
    assert logged([[0, 1, 2, 3]]) == {}


def test_rows_without_model_tokens_add_no_loss_and_no_gradient():
    batch, table = make_batch([[0, 0, 0], [0, 0]], [1.0, 0.0], [0, 0])
    algorithm = make_pair(GRPO(whiten_advantages=True, kl_loss_coef=0.1, entropy_loss_coef=0.1))
    flat = flatten(advantages(algorithm, batch, table))
    assert flat["actor/valid_sample_ratio"] == 0.0 and "critic/advantages/mean" not in flat
    loss, gradient, stats = loss_and_gradient(algorithm, batch, [[0], [1]])
    assert loss == 0.0 and gradient.tolist() == [0.0, 0.0, 0.0] and stats == {}


def test_on_policy_step_needs_no_old_logprobs():
    batch, table = mixed_batch()
    algorithm = make_pair(GRPO())
    advantages(algorithm, batch, table)
    values = batch.old_logprobs
    results = []
    for old in (values, None):
        batch.old_logprobs = old
        logprobs = values.clone().requires_grad_()
        loss, stats = algorithm.objective.loss(Outputs(logprobs), batch, norms_of(batch))
        loss.backward()
        results.append((loss.item(), logprobs.grad, flatten(stats)))
    assert results[0][0] == results[1][0] and results[0][2] == results[1][2]
    assert torch.equal(results[0][1], results[1][1]) and results[0][1].abs().sum() > 0


@pytest.mark.parametrize("update", [{"ppo_epochs": 2}, {"num_mini_batches": 2}])
def test_several_optimizer_steps_need_old_logprobs(update):
    batch, table = mixed_batch()
    algorithm = make_pair(GRPO(**update))
    advantages(algorithm, batch, table)
    logprobs, batch.old_logprobs = batch.old_logprobs, None
    with pytest.raises(ValueError, match=r"batch\.old_logprobs must be filled for more than one optimizer step"):
        algorithm.objective.loss(Outputs(logprobs), batch, norms_of(batch))


def test_kl_terms_need_the_reference():
    batch, table = mixed_batch()
    batch.ref_logprobs = None
    with pytest.raises(ValueError, match=r"batch\.ref_logprobs must be filled for kl_reward_coef > 0"):
        advantages(make_pair(GRPO(kl_reward_coef=0.1)), batch, table)


def test_every_algorithm_has_the_estimator_and_objective_of_its_spec():
    for name, spec in ALGORITHMS.items():
        section = spec.section(advantage_estimator=name)
        pair = factory.make_pair(spec, section)
        module, _, credit = spec.make.partition(":")
        assert (type(pair.estimator).__module__, type(pair.estimator).__name__) == (module, credit)
        assert f"{type(pair.objective).__module__}:{type(pair.objective).__name__}" == spec.objective
    assert len({spec.make for _, spec in ALGORITHMS.items()}) == 11


def test_a_supervised_run_has_its_own_objective_and_no_advantage_estimator():
    words = {
        "algorithm": {"advantage_estimator": "grpo", "ppo_epochs": 3, "kl_loss_coef": 0.1},
        "rollout": {"temperature": 0.5},
    }
    supervised = make_algorithm(parse({"pipeline": "sft"} | words))
    assert type(supervised.objective) is CrossEntropy and supervised.estimator is None
    assert (supervised.objective.temperature, supervised.objective.optimizer_steps) == (1.0, 1)
    assert not supervised.reads | supervised.objective.outputs | supervised.objective.logged
    rewarded = make_algorithm(parse(words))
    assert (rewarded.objective.temperature, rewarded.objective.optimizer_steps) == (0.5, 3)


def test_cross_entropy_by_hand():
    batch, _ = make_batch([[0, 1, 1], [0, 1]], [0.0, 0.0], [0, 1])
    logprobs = torch.tensor([-9.0, -1.0, -2.0, -9.0, -3.0], requires_grad=True)
    loss, stats = CrossEntropy().loss(Outputs(logprobs), batch, Norms(12.0, 4.0))
    loss.backward()
    assert loss.item() == pytest.approx(0.5) and flatten(stats) == {"sft/loss": 2.0}
    assert logprobs.grad.tolist() == pytest.approx([0, -1 / 12, -1 / 12, 0, -1 / 12])


@pytest.mark.parametrize(
    ("section", "reads"),
    [
        (GRPO(), set()),
        (GRPO(kl_loss_coef=0.1), {"ref_logprobs"}),
        (GRPO(kl_reward_coef=0.1), {"old_logprobs", "ref_logprobs"}),
        (Reinforce(ppo_epochs=2), {"old_logprobs"}),
        (ReinforcePlusPlus(num_mini_batches=2, kl_loss_coef=0.1), {"old_logprobs", "ref_logprobs"}),
    ],
)
def test_an_algorithm_declares_exactly_the_fields_that_it_needs(section, reads):
    """These fields, and no fewer, suffice to compute advantages and loss."""
    pair = make_pair(section)
    assert pair.reads - {"advantages"} == reads
    assert ("ref_logprobs" in reads) == section.uses_reference  # which the layout reads without torch
    for missing in (set(), *({field} for field in reads)):
        batch, table = mixed_batch()
        logprobs = batch.old_logprobs.clone()
        for field in {"old_logprobs", "ref_logprobs"} - (reads - missing):
            setattr(batch, field, None)
        try:
            advantages(pair, batch, table)
            pair.objective.loss(Outputs(logprobs), batch, norms_of(batch))
            failed = ""
        except ValueError as error:
            failed = str(error)
        assert bool(failed) == bool(missing) and all(f"batch.{field} must be filled" in failed for field in missing)


@pytest.mark.parametrize(("coefficient", "asked"), [(0.0, "logged"), (0.1, "outputs")])
def test_entropy_has_gradients_only_where_the_loss_uses_it(coefficient, asked):
    objective = make_pair(GRPO(entropy_loss_coef=coefficient)).objective
    assert getattr(objective, asked) == {"entropy"} and objective.outputs.isdisjoint(objective.logged)


def test_every_domain_has_separate_statistics():
    batch, table = mixed_batch()
    advantages(make_pair(GRPO()), batch, table)
    assert domain_stats(batch, replace(table, domains={"one": [1, 2, 3]})) == {}, "they are those of the batch"
    stats = domain_stats(batch, replace(table, domains={"a": [1], "b": [2, 3], "absent": []}))
    expected = {
        "domain/a/critic/score/*": (8.0, 4, 0.0, 5.0), "domain/b/critic/score/*": (4.5, 3, 0.5, 3.0),
        "domain/a/critic/rewards/*": (8.0, 4, 0.0, 5.0), "domain/b/token/response_length/*": (10.0, 3, 2.0, 4.0),
        "domain/a/token/response_length/*": (7.0, 4, 0.0, 4.0), "domain/b/token/prompt_length/*": (4.0, 3, 1.0, 2.0),
        "domain/a/actor/valid_sample_ratio": (3.0, 4, 0.0, 1.0),
        "domain/b/actor/valid_sample_ratio": (2.0, 3, 0.0, 1.0),
        "domain/a/token/response_length/clip_ratio": (1.0, 4, 0.0, 1.0),
        "domain/b/group/all_correct_ratio": (1.0, 2, 0.0, 1.0),
    }  # fmt: skip
    assert {name: tuple(stats[name]) for name in expected} == expected
    assert not any(name.startswith("domain/absent") for name in stats)
    whole = advantage_stats(batch)["critic/advantages/*"]
    parts = merge([{"x": stats[f"domain/{name}/critic/advantages/*"]} for name in "ab"])["x"]
    assert parts == pytest.approx(whole)
    old, ref, rows = batch.old_logprobs, batch.ref_logprobs, batch.row_ids
    for name, first, last in (("a", 0, 3), ("b", 4, 6)):
        chosen = [t for t in range(batch.num_tokens) if batch.loss_mask[t] and first <= rows[t] <= last]
        weights = [float(batch.weights[rows[t]]) for t in chosen]
        gaps = [float(ref[t] - old[t]) for t in chosen]
        total = sum(w * (math.exp(gap) - gap - 1) for w, gap in zip(weights, gaps, strict=True))
        assert stats[f"domain/{name}/critic/kl"][:2] == pytest.approx((total, sum(weights)))
    batch.ref_logprobs = None
    assert "domain/a/critic/kl" not in domain_stats(batch, replace(table, domains={"a": [1], "b": [2, 3]}))


def test_responses_of_mixed_weight_versions_are_counted():
    batch, table = mixed_batch()
    assert batch_stats(batch, table)["token/mixed_weights_ratio"].total == 0
    batch.versions[batch.row_ids == 4] = torch.tensor([-1, 3, 3, 4, 4], dtype=torch.int32)
    batch.versions[batch.row_ids == 5] = torch.tensor([-1, 2, -1, -1, 2], dtype=torch.int32)
    stats = batch_stats(batch, table)["token/mixed_weights_ratio"]
    assert (stats.total, stats.count) == (1, 7)
