"""On-policy distillation: advantages by hand, the exact gradient of the reverse KL, and what never enters the loss."""

from __future__ import annotations

import pytest
import torch

from hpcrl.algorithms.distill import DistillAdvantage
from hpcrl.algorithms.factory import make_algorithm
from hpcrl.algorithms.interface import Outputs, RewardTable
from hpcrl.algorithms.metrics import advantage_stats
from hpcrl.algorithms.spec import Distill
from hpcrl.config import load
from hpcrl.rollout.batch import Batch, Norms
from tests.algorithms.test_algorithms import make_batch

DISTILL = ["pipeline=distill", "algorithm=distill", "model.path=a", "teacher.path=b"]


def alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def batch_of(old: list[float], teacher: list[float], rewards: list[float]) -> Batch:
    """Rows of two prompt tokens and two model tokens, whose log-probs are given in order."""
    batch, _ = make_batch([[0, 0, 1, 1]] * len(rewards), rewards, list(range(len(rewards))))
    batch.old_logprobs = torch.zeros(batch.num_tokens).masked_scatter(batch.loss_mask, torch.tensor(old))
    batch.teacher_logprobs = torch.zeros(batch.num_tokens).masked_scatter(batch.loss_mask, torch.tensor(teacher))
    return batch


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [1.0, -3.0]])
def test_an_advantage_is_the_log_ratio_of_its_token_alone(rewards: list[float]) -> None:
    batch = batch_of([-1.0, -2.0, -0.5, -4.0], [-1.5, -0.25, -0.5, -3.0], rewards)
    DistillAdvantage(Distill(), coef=2.0).assign(batch, RewardTable.of(batch), alone)
    assert batch.advantages is not None and batch.returns is not None
    assert batch.advantages[batch.loss_mask].tolist() == [-1.0, 3.5, 0.0, 2.0]  # 2 x (teacher - policy), no sum
    assert not batch.advantages[~batch.loss_mask].any() and torch.equal(batch.returns, batch.advantages)
    stats = advantage_stats(batch)
    assert stats["distill/reverse_kl"][:2] == pytest.approx((0.5 - 1.75 + 0.0 - 1.0, 4))
    assert stats["distill/teacher_logprob"][:2] == pytest.approx((-5.25, 4))


def test_keys_that_clip_and_the_kl_to_a_reference_apply() -> None:
    batch = batch_of([-1.0, -2.0], [-4.0, -1.0], [0.0])
    batch.ref_logprobs = torch.zeros(batch.num_tokens).masked_scatter(batch.loss_mask, torch.tensor([-1.0, -4.0]))
    config = Distill(reward_clip=2.0, kl_reward_coef=0.5)  # k1: old - ref = [0, 2]
    estimator = DistillAdvantage(config)
    assert estimator.reads == {"old_logprobs", "teacher_logprobs", "ref_logprobs"}
    estimator.assign(batch, RewardTable.of(batch), alone)
    assert batch.advantages is not None and batch.advantages[batch.loss_mask].tolist() == [-2.0, 1.0 - 1.0]


def test_a_batch_without_a_teachers_pass_is_refused() -> None:
    batch = batch_of([-1.0, -2.0], [-4.0, -1.0], [0.0])
    del batch.columns["teacher_logprobs"]
    with pytest.raises(ValueError, match="teacher_logprobs must be filled for algorithm=distill"):
        DistillAdvantage(Distill()).assign(batch, RewardTable.of(batch), alone)


def test_the_expected_gradient_is_that_of_the_exact_reverse_kl() -> None:
    """One token of a vocabulary of five, each drawn with the policy's probability: the loss's gradient, weighted by
    these, is autograd's of sum p log(p / q)."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(5, requires_grad=True), torch.randn(5).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    algorithm = make_algorithm(load(DISTILL))
    assert algorithm.estimator is not None and "teacher_logprobs" in algorithm.reads
    found = torch.zeros(5)
    for token in range(5):
        batch, table = make_batch([[0, 1]], [0.0], [0])
        for name, values in (("old_logprobs", policy.detach()), ("teacher_logprobs", teacher)):
            setattr(batch, name, torch.zeros(batch.num_tokens).masked_fill(batch.loss_mask, float(values[token])))
        algorithm.estimator.assign(batch, table, alone)
        drawn = torch.zeros(batch.num_tokens).masked_scatter(batch.loss_mask, policy[token])
        outputs = Outputs(drawn, torch.zeros(batch.num_tokens))
        loss, _ = algorithm.objective.loss(outputs, batch, Norms(1.0, 1.0))
        found += policy[token].exp().detach() * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.allclose(found, exact, rtol=0, atol=1e-6) and exact.abs().max() > 0.1


def test_coef_scales_the_advantage() -> None:
    estimator = make_algorithm(load([*DISTILL, "teacher.coef=0.25"])).estimator
    assert isinstance(estimator, DistillAdvantage) and estimator.coef == 0.25
