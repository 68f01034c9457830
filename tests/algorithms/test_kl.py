"""The KL estimators' expected gradients against the gradient of the exact KL of a small categorical distribution, and
the policies at which descent on them ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcrl.algorithms.interface import Outputs, RewardTable
from hpcrl.algorithms.spec import Reinforce
from hpcrl.config import PolicyLoss
from hpcrl.rollout.batch import Norms, batch_from_samples
from hpcrl.rollout.types import FinishReason, Sample
from tests.algorithms.pairs import make_pair

LOGITS = torch.tensor([0.3, -1.2, 0.9, 0.1, -0.4])
REFERENCE = torch.tensor([-0.5, 0.2, 1.4, -0.9, 0.6]).log_softmax(-1)


def exact_gradient(logits: Tensor = LOGITS, reference: Tensor = REFERENCE) -> Tensor:
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    (logprobs.exp() * (logprobs - reference)).sum().backward()
    assert logits.grad is not None
    return logits.grad


class Expected:
    """The gradient of an algorithm's loss over one response per action, weighted with the action's probability."""

    def __init__(self, config: PolicyLoss, reference: Tensor = REFERENCE, rewards: Tensor | None = None):
        count = len(reference)
        mask, self._at = np.array([False, True]), torch.arange(1, 2 * count, 2)
        samples = [
            Sample(
                id=action, token_ids=np.array([0, action], dtype=np.int32), loss_mask=mask,
                turn_ids=np.where(mask, 0, -1).astype(np.int32), versions=np.where(mask, 0, -1).astype(np.int32),
                gen_logprobs=np.zeros(2, dtype=np.float32), finish_reason=FinishReason.STOP,
            )
            for action in range(count)
        ]  # fmt: skip
        self._batch = batch_from_samples(samples, range(count))
        if rewards is not None:
            self._batch.rewards = rewards
        self._table, self._pair = RewardTable.of(self._batch), make_pair(config)
        self._batch.ref_logprobs = self._spread(reference)

    def gradient(self, logits: Tensor) -> Tensor:
        logits = logits.detach().requires_grad_()
        logprobs = logits.log_softmax(-1)
        spread, batch = self._spread(logprobs), self._batch
        batch.weights, batch.old_logprobs = logprobs.detach().exp(), spread.detach()
        self._pair.estimator.assign(batch, self._table, lambda tensor: tensor)
        loss, _ = self._pair.objective.loss(Outputs(spread), batch, Norms(1.0, 1.0))
        loss.backward()
        assert logits.grad is not None
        return logits.grad

    def descend(self, logits: Tensor, steps: int = 60) -> Tensor:
        """The probabilities at which descent by the sign of the gradient ends."""
        logits = logits.clone()
        optimizer = torch.optim.Rprop([logits], lr=1.0, step_sizes=(1e-9, 2.0))
        for _ in range(steps):
            logits.grad = self.gradient(logits)
            optimizer.step()
        return logits.softmax(-1)

    def _spread(self, values: Tensor) -> Tensor:
        return values.new_zeros(2 * len(values)).index_copy(0, self._at, values)


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a, b, dim=0).item()


@pytest.mark.parametrize("config", [Reinforce(kl_reward_coef=1.0), Reinforce(kl_loss_coef=1.0)], ids=["reward", "loss"])
def test_default_estimator_has_the_expected_gradient_of_the_exact_kl(config: PolicyLoss) -> None:
    torch.testing.assert_close(Expected(config).gradient(LOGITS), exact_gradient(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ["abs", "k2", "k3"])
def test_other_estimators_in_the_reward_lack_the_gradient_of_the_kl(estimator: str) -> None:
    found = Expected(Reinforce(kl_reward_coef=1.0, kl_reward_estimator=estimator)).gradient(LOGITS)
    assert cosine(found, exact_gradient()) < 0.9


def test_k3_in_the_loss_has_the_gradient_of_the_forward_kl() -> None:
    found = Expected(Reinforce(kl_loss_coef=1.0, kl_loss_estimator="k3")).gradient(LOGITS)
    torch.testing.assert_close(found, LOGITS.softmax(-1) - REFERENCE.exp())
    assert 0.8 < cosine(found, exact_gradient()) < 0.99


def test_abs_in_the_loss_has_twice_the_gradient_of_the_total_variation() -> None:
    logits = LOGITS.clone().requires_grad_()
    (logits.softmax(-1) - REFERENCE.exp()).abs().sum().backward()  # twice the total variation
    found = Expected(Reinforce(kl_loss_coef=1.0, kl_loss_estimator="abs")).gradient(LOGITS)
    torch.testing.assert_close(found, logits.grad)


def test_k1_in_the_loss_has_no_gradient_and_is_refused() -> None:
    unchecked = Reinforce(kl_loss_coef=1.0).model_copy(update={"kl_loss_estimator": "k1"})
    assert Expected(unchecked).gradient(LOGITS).abs().max() < 1e-6
    with pytest.raises(ValueError, match="expected gradient of k1 is zero"):
        Reinforce(kl_loss_coef=1.0, kl_loss_estimator="k1")


def test_exact_kl_is_refused_and_names_estimators_with_its_expected_gradient() -> None:
    for place in ("reward", "loss"):
        with pytest.raises(ValueError, match="no engine has them; k1 in the reward and k2 in the loss"):
            Reinforce(**{f"kl_{place}_coef": 1.0, f"kl_{place}_estimator": "full"})


# -- a policy that has drifted far from the reference


@dataclass(frozen=True)
class Drifted:
    """Two tokens. The first: probability .99 in the policy, `reference` in the reference; rewards `reward` and 0."""

    reference: float
    reward: float = 0.0
    coefficient: float = 1.0

    def expected(self, **keys: object) -> Expected:
        rewards = torch.tensor([self.reward, 0.0])
        return Expected(Reinforce(**keys), pair_of(self.reference).log(), rewards)

    @property
    def exact(self) -> float:
        """The first token's probability p under the policy that maximises expected reward - coefficient x KL."""
        odds = self.reference / (1 - self.reference) * np.exp(self.reward / self.coefficient)
        return float(odds / (1 + odds))

    @property
    def of_forward_kl(self) -> float:
        """The p at which reward and penalty have equal gradients: p (1 - p) reward = coefficient (p - reference)."""
        if not self.reward:
            return self.reference
        half = (1 - self.coefficient / self.reward) / 2
        return half + (half**2 + self.coefficient / self.reward * self.reference) ** 0.5

    @property
    def of_total_variation(self) -> float:
        """The p that maximises p reward - coefficient x 2 |p - reference|: 1 if reward is above 2 x coefficient."""
        return 1.0 if self.reward > 2 * self.coefficient else self.reference


def pair_of(probability: float) -> Tensor:
    return torch.tensor([probability, 1 - probability], dtype=torch.float64)


FAR = [Drifted(0.011), Drifted(0.005), Drifted(0.001), Drifted(1e-4, reward=1.0, coefficient=0.1), Drifted(1e-12)]
POLICY = pair_of(0.99).log()


@pytest.mark.parametrize(("case", "gradient"), list(zip(FAR[:3], (0.090, 0.098, 0.114), strict=True)))
def test_kl_pulls_back_a_policy_that_has_drifted(case: Drifted, gradient: float) -> None:
    exact = exact_gradient(POLICY, pair_of(case.reference).log())
    assert exact[0].item() == pytest.approx(gradient, abs=5e-4)
    weighted = {"kl_loss_coef": 1.0, "kl_loss_estimator": "k3_weighted"}
    for keys in ({"kl_loss_coef": 1.0}, weighted, {"kl_reward_coef": 1.0}, {"kl_reward_coef": 1.0, "reward_clip": 0.5}):
        torch.testing.assert_close(case.expected(**keys).gradient(POLICY), exact, rtol=1e-5, atol=1e-7)


OPTIMA = [
    ("loss", "k2", "exact"),
    ("loss", "k3", "of_forward_kl"),
    ("loss", "k3_weighted", "exact"),
    ("loss", "abs", "of_total_variation"),
    ("reward", "k1", "exact"),
]


def test_every_estimator_in_the_loss_has_an_optimum() -> None:
    estimators = get_args(PolicyLoss.model_fields["kl_loss_estimator"].annotation)
    assert sorted(estimators) == sorted(name for place, name, _ in OPTIMA if place == "loss")


@pytest.mark.parametrize("case", FAR, ids=str)
@pytest.mark.parametrize(("place", "estimator", "optimum"), OPTIMA)
def test_descent_ends_at_the_optimum(place: str, estimator: str, optimum: str, case: Drifted) -> None:
    wanted = getattr(case, optimum)
    keys = {f"kl_{place}_coef": case.coefficient, f"kl_{place}_estimator": estimator}
    found = case.expected(**keys).descend(POLICY)[0].item()
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6)


def test_optima_of_the_rewarded_token_match_the_documentation() -> None:
    case = FAR[3]
    assert (round(case.exact, 3), round(case.of_forward_kl, 3), case.of_total_variation) == (0.688, 0.900, 1.0)
    assert case.expected(kl_loss_coef=0.0).descend(POLICY)[0] > 0.9999, "only the rewarded token remains"


@pytest.mark.parametrize("estimator", ["abs", "k2", "k3"])
def test_estimators_in_the_reward_except_k1_push_a_drifted_policy_further(estimator: str) -> None:
    keys = {"kl_reward_coef": 1.0, "kl_reward_estimator": estimator}
    assert FAR[0].expected(**keys).gradient(POLICY)[0] < 0
