"""`ratio_to=generator`: the loss uses the ratio to the generator's log-probs and needs no other log-probs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.algorithms.interface import Outputs
from hpcrl.algorithms.spec import GRPO, Reinforce
from hpcrl.algorithms.surrogates import SURROGATES
from hpcrl.metrics.stats import flatten
from hpcrl.rollout.batch import Batch, Norms
from hpcrl.spec.policy_loss import SURROGATE_KEYS
from tests.algorithms.pairs import make_pair
from tests.algorithms.test_algorithms import make_batch, mixed_batch, norms_of

LEVELS = ("token", "turn", "geometric", "sequence")


def batch_by_hand() -> Batch:
    """Three model tokens, in rows of two and one."""
    batch, _ = make_batch([[0, 1, 1], [0, 1]], [0.0, 0.0], [0, 1])
    batch.advantages = torch.tensor([0.0, 1.0, 1.0, 0.0, -2.0])
    batch.gen_logprobs = torch.log(torch.tensor([1.0, 0.4, 0.5, 1.0, 0.1]))
    batch.old_logprobs = None
    return batch


def loss_of(config: Any, batch: Batch, logprobs: Tensor, norms: Norms | None = None) -> tuple[Tensor, Tensor, Any]:
    """(loss, gradient of the log-probs, metrics)."""
    logprobs = logprobs.detach().requires_grad_()
    loss, stats = make_pair(config).objective.loss(Outputs(logprobs), batch, norms or norms_of(batch))
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad, flatten(stats)


def test_the_loss_by_hand() -> None:
    logprobs = torch.log(torch.tensor([1.0, 0.6, 0.55, 1.0, 0.05]))
    config = GRPO(ratio_to="generator", num_mini_batches=2)
    loss, gradient, flat = loss_of(config, batch_by_hand(), logprobs)
    # ratios 1.5, 1.1, .5: the first is clipped at 1.2, the last at .8 since its advantage is negative
    assert loss.item() == pytest.approx((-1.2 - 1.1 + 2 * 0.8) / 3)
    assert gradient.tolist() == pytest.approx([0, 0, -1.1 / 3, 0, 0])
    assert flat["actor/ratio_mean"] == pytest.approx(3.1 / 3) and flat["actor/clipfrac"] == pytest.approx(2 / 3)
    assert flat["actor/approxkl"] == pytest.approx(sum(math.log(r) ** 2 for r in (1.5, 1.1, 0.5)) / 6)
    # Without log-probs from before the step, trainer and generator are compared under the current weights.
    assert flat["actor/train_infer_diff_token_mean"] == pytest.approx((0.2 + 0.05 - 0.05) / 3)
    assert not any("correction" in name for name in flat)
    with pytest.raises(ValueError, match=r"old_logprobs must be filled"):
        loss_of(GRPO(num_mini_batches=2), batch_by_hand(), logprobs)


def test_a_single_optimizer_step_uses_the_ratio_to_the_generator() -> None:
    batch, logprobs = batch_by_hand(), torch.log(torch.tensor([1.0, 0.44, 0.5, 1.0, 0.11]))
    loss, gradient, _ = loss_of(GRPO(ratio_to="generator"), batch, logprobs)
    assert loss.item() == pytest.approx((-1.1 - 1 + 2.2) / 3, abs=1e-6)
    assert gradient[1].item() == pytest.approx(-1.1 / 3)
    assert loss_of(GRPO(), batch, logprobs)[0].item() == pytest.approx(0.0), "the trainer's own ratio is 1"


def test_truncated_sampling_is_compared_with_the_truncated_distribution() -> None:
    batch, logprobs = batch_by_hand(), torch.log(torch.tensor([1.0, 0.4, 0.5, 1.0, 0.1]))
    batch.gen_logprobs_behaviour = batch.gen_logprobs - math.log(0.8)  # sampling kept .8 of each distribution
    flat = loss_of(GRPO(ratio_to="generator"), batch, logprobs)[2]
    assert flat["actor/ratio_mean"] == pytest.approx(0.8)
    assert flat["actor/train_infer_ratio_token_mean"] == pytest.approx(1.0), "both without truncation"


CONFIGS = [
    Reinforce(surrogate=name, ratio_level=level, ratio_to="generator", num_mini_batches=2, kimi_tau=0.6)
    for name in SURROGATES
    for level in LEVELS
    if "ratio_to" in SURROGATE_KEYS[name]
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.surrogate}-{c.ratio_level}")
def test_loss_equals_the_trainer_ratio_when_old_log_probs_are_the_generators(config: Any) -> None:
    batch, _ = mixed_batch()
    batch.advantages = torch.cos(torch.arange(batch.num_tokens)) * batch.loss_mask
    batch.marked = batch.loss_mask & (torch.arange(batch.num_tokens) % 3 == 0)
    logprobs = batch.gen_logprobs + 0.3 * torch.sin(torch.arange(batch.num_tokens)) * batch.loss_mask
    found = loss_of(config, batch, logprobs)
    trainer = config.model_copy(update={"ratio_to": "trainer"})
    before = loss_of(trainer, batch, logprobs)
    assert not torch.allclose(found[1], before[1], atol=1e-4)
    batch.old_logprobs = batch.gen_logprobs
    same = loss_of(trainer, batch, logprobs)
    torch.testing.assert_close(found[:2], same[:2])
    halves = [batch.select(range(3)), batch.select(range(3, 7))]
    cut, norms = [logprobs[: halves[0].num_tokens], logprobs[halves[0].num_tokens :]], norms_of(batch)
    parts = [loss_of(config, half, own, norms) for half, own in zip(halves, cut, strict=True)]
    torch.testing.assert_close(sum(part[0] for part in parts), found[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), found[1], rtol=1e-5, atol=1e-6)


def verl_loss(logprobs: Tensor, drawn: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float, c: float):
    """verl's bypass mode with ppo_clip on padded rows [B, T]: the mean over tokens of the clipped loss with the ratio
    to the log-probs of the rollout, no importance weight, and dual clip for negative advantages."""
    ratio = torch.exp(torch.clip(logprobs - drawn, -20.0, 20.0))
    worst = torch.maximum(-advantages * ratio, -advantages * torch.clip(ratio, 1 - low, 1 + high))
    bounded = torch.where(advantages < 0, torch.minimum(worst, -advantages * c), worst)
    return (bounded * mask).sum() / mask.sum()


@pytest.mark.parametrize("seed", range(5))
def test_parity_with_verls_bypass_mode(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    lengths = [3, 1, 6, 4]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    drawn, advantages = -torch.rand(4, 6, generator=random) * 3, torch.randn(4, 1, generator=random).expand(4, 6)
    logprobs = (drawn + 0.8 * torch.randn(4, 6, generator=random)).requires_grad_()
    verl = verl_loss(logprobs, drawn, advantages, mask, 0.2, 0.28, 3.0)
    verl.backward()
    batch, _ = make_batch([[0] + [1] * length for length in lengths], [0.0] * 4, [0] * 4)

    def packed(rows: Tensor) -> Tensor:
        return torch.zeros(batch.num_tokens).masked_scatter(batch.loss_mask, rows[mask])

    batch.gen_logprobs, batch.advantages, batch.old_logprobs = packed(drawn), packed(advantages), None
    config = GRPO(ratio_to="generator", pg_clip_high=0.28, dual_clip=3.0, ppo_epochs=2)
    loss, gradient, _ = loss_of(config, batch, packed(logprobs.detach()))
    torch.testing.assert_close(loss, verl.detach())
    assert logprobs.grad is not None
    torch.testing.assert_close(gradient, packed(logprobs.grad))


@pytest.mark.parametrize(
    ("config", "reads"),
    [
        (GRPO(ratio_to="generator", ppo_epochs=2), set()),
        (GRPO(ratio_to="generator", num_mini_batches=4, kl_loss_coef=0.1), {"ref_logprobs"}),
        (GRPO(ratio_to="generator", kl_reward_coef=0.1), {"old_logprobs", "ref_logprobs"}),  # of the trained policy
        (GRPO(num_mini_batches=4), {"old_logprobs"}),
    ],
)
def test_the_forward_pass_for_old_log_probs_is_skipped(config: Any, reads: set[str]) -> None:
    assert make_pair(config).reads - {"advantages"} == reads


def test_updates_within_a_step_do_not_count_as_mismatch() -> None:
    batch, logprobs = batch_by_hand(), torch.log(torch.tensor([1.0, 0.6, 0.55, 1.0, 0.05]))
    batch.on_policy = batch.loss_mask.clone()
    for keys, known in (({}, True), ({"ppo_epochs": 2}, False)):
        flat = loss_of(GRPO(ratio_to="generator", **keys), batch, logprobs)[2]
        assert any(name.startswith("mismatch/") for name in flat) == known
    batch.old_logprobs = batch.gen_logprobs
    flat = loss_of(GRPO(ratio_to="generator", ppo_epochs=2), batch, logprobs)[2]
    assert flat["mismatch/diff/max"] == 0


def test_old_log_probs_serve_the_metrics_if_the_estimator_reads_them() -> None:
    batch, logprobs = batch_by_hand(), torch.log(torch.tensor([1.0, 0.6, 0.55, 1.0, 0.05]))
    batch.old_logprobs, batch.ref_logprobs = batch.gen_logprobs.clone(), batch.gen_logprobs.clone()
    flat = loss_of(GRPO(ratio_to="generator", kl_reward_coef=0.1, ppo_epochs=2), batch, logprobs)[2]
    assert flat["actor/train_infer_diff_token_mean"] == 0 and flat["critic/kl"] == 0
    assert flat["actor/ratio_mean"] == pytest.approx(3.1 / 3)
