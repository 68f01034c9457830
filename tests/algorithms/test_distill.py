"""On-policy distillation: the exact gradient of the reverse KL in expectation, and no rewards in the loss."""

from __future__ import annotations

import pytest
import torch

from hpcrl.algorithms.factory import make_algorithm
from hpcrl.algorithms.interface import Outputs, RewardTable
from hpcrl.algorithms.no_advantage import NoAdvantage
from hpcrl.algorithms.token_losses import fill_weights
from hpcrl.config import load
from hpcrl.rollout.batch import Norms
from tests.algorithms.test_algorithms import make_batch

DISTILL = ["pipeline=distill", "model.path=a", "teacher.path=b", "rollout.group_size=1"]


def alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "remax", "gdpo"])
def test_no_algorithm_reads_rewards_if_their_weight_is_0(algorithm: str) -> None:
    config = load([*DISTILL, f"algorithm={algorithm}"])
    assert isinstance(make_algorithm(config).estimator, NoAdvantage)
    assert not config.uses_critic and config.decoupling_eps is None and not config.algorithm_spec.greedy_baseline
    mixed = load([*DISTILL, "loss.default.policy=1", f"algorithm={algorithm}", "rollout.group_size=2"])
    assert not isinstance(make_algorithm(mixed).estimator, NoAdvantage)
    batch, _ = make_batch([[0, 1, 1]] * 2, [1.0, -3.0], [0, 1])
    NoAdvantage(config.algorithm).assign(batch, RewardTable.of(batch), alone)
    assert batch.advantages is not None and not batch.advantages.any()


def test_the_expected_gradient_is_that_of_the_exact_reverse_kl() -> None:
    """One token of a vocabulary of five, each drawn with the policy's probability: the loss's gradient, weighted by
    these, is autograd's of sum p log(p / q)."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(5, requires_grad=True), torch.randn(5).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    config = load(DISTILL)
    algorithm = make_algorithm(config)
    assert algorithm.estimator is not None
    found = torch.zeros(5)
    for token in range(5):
        batch, table = make_batch([[0, 1]], [0.0], [0])
        for name, values in (("old_logprobs", policy.detach()), ("teacher_logprobs", teacher)):
            setattr(batch, name, torch.zeros(batch.num_tokens).masked_fill(batch.loss_mask, float(values[token])))
        algorithm.estimator.assign(batch, table, alone)
        fill_weights(config, batch, {})
        drawn = torch.zeros(batch.num_tokens).masked_scatter(batch.loss_mask, policy[token])
        outputs = Outputs(drawn, torch.zeros(batch.num_tokens))
        loss, _ = algorithm.objective.loss(outputs, batch, Norms(1.0, 1.0))
        found += policy[token].exp().detach() * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.allclose(found, exact, rtol=0, atol=1e-6) and exact.abs().max() > 0.1
