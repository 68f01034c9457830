"""DPPO by hand, and against a plain reading of the paper's formula, which is verl's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.algorithms.interface import Outputs
from hpcrl.algorithms.spec import GRPO
from hpcrl.metrics.stats import flatten
from hpcrl.rollout.batch import Batch
from tests.algorithms.pairs import make_pair
from tests.algorithms.test_algorithms import make_batch, norms_of

KEYS: dict[str, Any] = {"surrogate": "dppo", "num_mini_batches": 2, "loss_aggregation": "token-mean"}


def of_batch(batch: Batch, logprobs: Tensor, **keys: Any) -> tuple[Tensor, dict[str, float]]:
    loss, stats = make_pair(GRPO(**KEYS, **keys)).objective.loss(Outputs(logprobs), batch, norms_of(batch))
    return loss, flatten(stats)


@pytest.mark.parametrize(
    ("divergence", "bound", "kept"),
    # old -> new: .5 -> .65, .5 -> .7 (up); .001 -> .1, a ratio of 100; .5 -> .3, .5 -> .7 (down)
    [("tv", 0.16, [1, 0, 1, 0, 1]), ("kl", 0.06, [1, 0, 0, 0, 1])],
)
def test_gradients_by_hand(divergence: str, bound: float, kept: list[int]) -> None:
    batch, _ = make_batch([[0, 1, 1, 1], [0, 1, 1]], [0.0] * 2, [0] * 2)
    old, new = torch.tensor([1, 0.5, 0.5, 0.001, 1, 0.5, 0.5]), torch.tensor([1, 0.65, 0.7, 0.1, 1, 0.3, 0.7])
    batch.old_logprobs, logprobs = old.log(), new.log().requires_grad_()
    batch.advantages = torch.tensor([0, 2.0, 2.0, 2.0, 0, -1.0, -1.0])
    loss, stats = of_batch(batch, logprobs, dppo_divergence=divergence, pg_clip_low=bound, pg_clip_high=bound)
    loss.backward()
    weights = [1.3, 1.4, 20.0, 0.6, 1.4]  # the ratio of 100 is cut at 20
    wanted = [-k * w * a / 5 for k, w, a in zip(kept, weights, [2, 2, 2, -1, -1], strict=True)]
    assert logprobs.grad[[1, 2, 3, 5, 6]].tolist() == pytest.approx(wanted)
    assert loss.item() == pytest.approx(sum(w * math.log(p) for w, p in zip(wanted, new[[1, 2, 3, 5, 6]], strict=True)))
    assert stats["actor/clipfrac"] == pytest.approx(1 - sum(kept) / 5)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_gradients_match_the_formula(divergence: str) -> None:
    """verl 1dda039, core_algos.py, dppo_tv and dppo_kl, one token at a time."""
    batch, _ = make_batch([[0, 1, 1], [0, 0, 1, 0, 1, 1], [0, 1, 1, 1, 1]], [0.0] * 3, [0] * 3, seed=2)
    batch.advantages = torch.tensor([0.7, -1.3, 1.1])[batch.row_ids] * batch.loss_mask
    logprobs = (batch.old_logprobs + 0.5 * torch.cos(2 * torch.arange(batch.num_tokens))).clamp(max=-0.01)
    logprobs = (logprobs * batch.loss_mask).requires_grad_()
    low, high, wanted, left = 0.02, 0.05, torch.zeros(batch.num_tokens), 0
    for t in batch.loss_mask.nonzero()[:, 0].tolist():
        p, q, a = (x[t].double().item() for x in (logprobs.exp(), batch.old_logprobs.exp(), batch.advantages))
        if divergence == "tv":
            inside = p - q <= high if a > 0 else p - q >= -low
        else:
            kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            inside = (kl <= high or p <= q) if a > 0 else (kl <= low or p >= q)
        left += not inside
        wanted[t] = -min(p / q, 1.2) * a * inside / int(batch.loss_mask.sum())
    assert 0 < left < int(batch.loss_mask.sum())
    keys = {"dppo_divergence": divergence, "pg_clip_low": low, "pg_clip_high": high, "dppo_ratio_max": 1.2}
    of_batch(batch, logprobs, **keys)[0].backward()
    torch.testing.assert_close(logprobs.grad, wanted)


def test_certain_tokens_have_finite_divergences() -> None:
    batch, _ = make_batch([[0, 1, 1]], [0.0], [0])
    batch.old_logprobs, batch.advantages = torch.zeros(3), torch.ones(3) * batch.loss_mask
    logprobs = torch.tensor([0.0, 0.0, -30.0]).requires_grad_()
    loss, _ = of_batch(batch, logprobs, dppo_divergence="kl")
    loss.backward()
    assert bool(torch.isfinite(loss)) and bool(torch.isfinite(logprobs.grad).all())
