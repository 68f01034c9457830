"""The off-policy sequence mask and the weighted KL estimate of DeepSeek-V3.2 (arXiv 2512.02556)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcrl.algorithms.interface import Outputs
from hpcrl.algorithms.spec import GRPO, Reinforce
from hpcrl.metrics.stats import flatten
from hpcrl.rollout.batch import Norms
from tests.algorithms.pairs import make_pair
from tests.algorithms.test_algorithms import make_batch, norms_of
from tests.algorithms.test_kl import LOGITS, REFERENCE, exact_gradient

MASKS = [[0, 1, 1], [0, 1, 1], [0, 1], [0, 1, 0, 1]]


def test_the_mask_by_hand() -> None:
    batch, _ = make_batch(MASKS, [0.0] * 4, [0] * 4)
    batch.advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])[batch.row_ids] * batch.loss_mask
    gaps = torch.tensor(
        [0, 0.9, 0.3, 0, 5.0, 5.0, 0, -3.0, 0, 0.1, 0, 0.8]
    )  # the generator's log-probs minus the policy's
    batch.old_logprobs = None
    logprobs = (batch.gen_logprobs - gaps).requires_grad_()

    def gradient(most: float | None) -> tuple[list[bool], float]:
        logprobs.grad = None
        loss, stats = make_pair(GRPO(off_policy_mask=most)).objective.loss(Outputs(logprobs), batch, norms_of(batch))
        loss.backward()
        return (logprobs.grad[batch.loss_mask] != 0).tolist(), flatten(stats).get("actor/off_policy_masked", -1.0)

    # Means .6, 5 (of positive advantage), -3 (closer than the generator), .45 over both turns
    assert gradient(None) == ([True] * 7, -1.0)
    assert gradient(0.5) == ([False, False, True, True, True, True, True], pytest.approx(2 / 7))
    assert gradient(0.4) == ([False, False, True, True, True, False, False], pytest.approx(4 / 7))
    assert gradient(0.7)[1] == 0.0


def test_the_mask_matches_trl() -> None:
    """TRL f2cd577, GRPOTrainer.get_off_policy_mask: a response is kept if its advantage is not negative, or if the mean
    of sampled minus current log-probs over its tokens is at most the threshold."""
    batch, _ = make_batch(MASKS, [0.0] * 4, [0] * 4, seed=6)
    most, kept, total = 0.05, 0, 0.0
    batch.advantages = torch.tensor([-1.0, 1.0, -0.5, -2.0])[batch.row_ids] * batch.loss_mask
    for row in range(4):
        mask = batch.loss_mask & (batch.row_ids == row)
        distance = (batch.gen_logprobs - batch.old_logprobs)[mask].mean().item()
        if batch.advantages[mask][0] >= 0 or distance <= most:
            kept, total = kept + int(mask.sum()), total - batch.advantages[mask].sum().item()
    assert 0 < kept < 7
    objective = make_pair(GRPO(off_policy_mask=most)).objective
    loss, stats = objective.loss(Outputs(batch.old_logprobs.clone()), batch, norms_of(batch))
    assert loss.item() == pytest.approx(total / 7, rel=1e-5)
    assert flatten(stats)["actor/off_policy_masked"] == pytest.approx(1 - kept / 7)


def of_drawn(drawn: torch.Tensor, **keys: Any) -> torch.Tensor:
    """Gradient of the loss over one response per action, weighted by its sampling probability."""
    logits, count = LOGITS.clone().requires_grad_(), len(LOGITS)
    batch, _ = make_batch([[0, 1]] * count, [0.0] * count, range(count))
    places = torch.arange(1, 2 * count, 2)
    batch.weights, batch.advantages = drawn.exp(), torch.zeros(2 * count)
    batch.old_logprobs = batch.gen_logprobs = torch.zeros(2 * count).index_copy(0, places, drawn)
    batch.ref_logprobs = torch.zeros(2 * count).index_copy(0, places, REFERENCE)
    logprobs = torch.zeros(2 * count).index_copy(0, places, logits.log_softmax(-1))
    config = Reinforce(kl_loss_coef=1.0, num_mini_batches=2, **keys)
    make_pair(config).objective.loss(Outputs(logprobs), batch, Norms(1.0, 1.0))[0].backward()
    assert logits.grad is not None
    return logits.grad


def test_weighted_kl_estimate_has_the_exact_gradient_for_any_sampling_policy() -> None:
    """TRL f2cd577, use_bias_correction_kl: k3 times the ratio, differentiated as a whole."""
    current = LOGITS.log_softmax(-1)
    other = torch.tensor([1.0, 0.3, -0.8, 0.2, 0.5]).log_softmax(-1)
    for drawn in (current, other):
        torch.testing.assert_close(of_drawn(drawn, kl_loss_estimator="k3_weighted"), exact_gradient())
        to_generator = of_drawn(drawn, kl_loss_estimator="k3_weighted", ratio_to="generator")
        torch.testing.assert_close(to_generator, exact_gradient())
    torch.testing.assert_close(of_drawn(current), exact_gradient())
    for estimator in ("k2", "k3"):
        assert (of_drawn(other, kl_loss_estimator=estimator) - exact_gradient()).abs().max() > 0.1
