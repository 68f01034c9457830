"""The expected gradients of the KL estimators against that of the exact KL of a small categorical distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcrl.algorithms.base import Outputs, RewardTable
from hpcrl.algorithms.specs import Reinforce
from hpcrl.config import PolicyLoss
from hpcrl.rollout.batch import Norms, batch_from_samples
from hpcrl.rollout.types import FinishReason, Sample
from tests.algorithms.pairs import make_pair

LOGITS = torch.tensor([0.3, -1.2, 0.9, 0.1, -0.4])
REFERENCE = torch.tensor([-0.5, 0.2, 1.4, -0.9, 0.6]).log_softmax(-1)


def exact_gradient() -> torch.Tensor:
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    (logprobs.exp() * (logprobs - REFERENCE)).sum().backward()
    return logits.grad


def expected_gradient(config: PolicyLoss) -> torch.Tensor:
    """Gradient of the algorithm's loss over one response per action, weighted with the action's probability."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    mask = np.array([False, True])
    samples = [
        Sample(
            id=action, token_ids=np.array([0, action], dtype=np.int32), loss_mask=mask,
            turn_ids=np.where(mask, 0, -1).astype(np.int32), versions=np.where(mask, 0, -1).astype(np.int32),
            gen_logprobs=np.zeros(2, dtype=np.float32), finish_reason=FinishReason.STOP,
        )
        for action in range(len(LOGITS))
    ]  # fmt: skip
    batch = batch_from_samples(samples, range(len(samples)))
    batch.weights = logprobs.detach().exp()
    spread = torch.zeros(2 * len(LOGITS)).index_copy(0, torch.arange(1, 2 * len(LOGITS), 2), logprobs)
    batch.old_logprobs = spread.detach()
    batch.ref_logprobs = torch.zeros(2 * len(LOGITS)).index_copy(0, torch.arange(1, 2 * len(LOGITS), 2), REFERENCE)
    pair = make_pair(config)
    table = RewardTable.of(batch)
    pair.credit.assign(batch, table, lambda tensor: tensor)
    loss, _ = pair.objective.loss(Outputs(spread), batch, Norms(1.0, 1.0))
    loss.backward()
    return logits.grad


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a, b, dim=0).item()


@pytest.mark.parametrize("config", [Reinforce(kl_reward_coef=1.0), Reinforce(kl_loss_coef=1.0)], ids=["reward", "loss"])
def test_by_default_the_expected_gradient_is_that_of_the_exact_kl(config: PolicyLoss) -> None:
    torch.testing.assert_close(expected_gradient(config), exact_gradient(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ["abs", "k2", "k3"])
def test_no_other_estimator_in_the_reward_has_the_gradient_of_the_kl(estimator: str) -> None:
    found = expected_gradient(Reinforce(kl_reward_coef=1.0, kl_reward_estimator=estimator))
    assert cosine(found, exact_gradient()) < 0.9


def test_k3_in_the_loss_has_the_gradient_of_the_forward_kl() -> None:
    found = expected_gradient(Reinforce(kl_loss_coef=1.0, kl_loss_estimator="k3"))
    torch.testing.assert_close(found, LOGITS.softmax(-1) - REFERENCE.exp())
    assert 0.8 < cosine(found, exact_gradient()) < 0.99


def test_k1_in_the_loss_has_no_gradient_and_is_refused() -> None:
    unchecked = Reinforce(kl_loss_coef=1.0).model_copy(update={"kl_loss_estimator": "k1"})
    assert expected_gradient(unchecked).abs().max() < 1e-6
    with pytest.raises(ValueError, match="expected gradient of k1 is zero"):
        Reinforce(kl_loss_coef=1.0, kl_loss_estimator="k1")


def test_the_exact_kl_is_refused_with_the_estimators_that_have_its_expected_gradient() -> None:
    for place in ("reward", "loss"):
        with pytest.raises(ValueError, match="no engine has them; k1 in the reward and k2 in the loss"):
            Reinforce(**{f"kl_{place}_coef": 1.0, f"kl_{place}_estimator": "full"})
