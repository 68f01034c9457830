"""Advantages and losses do not depend on the order of rows or on their prompts, ranks and micro-batches."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcrl.algorithms.interface import AllSum, Outputs, RewardTable
from hpcrl.algorithms.spec import (
    GAE,
    GDPO,
    GRPO,
    RLOO,
    GiGPO,
    RaftPlusPlus,
    Reinforce,
    ReinforcePlusPlus,
    ReMax,
    TurnGAE,
    TurnLoss,
    TurnReinforce,
)
from hpcrl.algorithms.surrogates import SURROGATES
from hpcrl.config import PolicyLoss
from hpcrl.metrics.stats import Stats, flatten, merge
from hpcrl.rollout.batch import Batch, Norms, batch_from_samples
from hpcrl.rollout.types import FinishReason, Sample
from hpcrl.spec.policy_loss import SURROGATE_KEYS
from hpcrl.spec.tables import ALGORITHMS
from tests.algorithms.pairs import make_pair

Part, Found = TypeVar("Part"), TypeVar("Found")

EPISODES = ["0111", "001011", "011", "000", "01111", "0100101", "0011", "0010010"]
"""1: a token of the model. Some have several turns, one has none."""
GROUPS = [1, 1, 1, 1, 2, 2, 3, 3]
REWARDS = [1.0, 0.0, 2.0, 5.0, 0.5, 1.0, 3.0, -1.0]
WEIGHTS = [1.0, 2.0, 0.5, 1.0, 0.0, 1.0, 2.0, 1.0]
ALL = list(range(8))
LAYOUTS: dict[str, tuple[int, list[list[int]]]] = {
    "another order": (0, [[5, 2, 7, 0, 3, 6, 1, 4]]),
    "longer prompts": (3, [ALL]),
    "three ranks": (0, [[2, 7], [], [3, 0, 6, 1, 5, 4]]),
    "all of these": (2, [[6], [4, 1, 3], [], [7, 0, 2, 5]]),
}
"""(tokens by which prompts are longer, rows of each rank or micro-batch)."""


def rows_of(rows: Sequence[int], longer: int = 0) -> Batch:
    """These episodes as rows. Values of model tokens do not depend on other tokens."""
    samples = []
    for row in rows:
        mask = np.array([*[0] * longer, *map(int, EPISODES[row])], dtype=bool)
        turns = np.cumsum(mask & ~np.concatenate([[False], mask[:-1]])) - 1
        shown = np.where(turns < 0, 7, 8)  # a prompt is not the state after an observation
        samples.append(
            Sample(
                id=10 * row, token_ids=np.where(mask, 100 + np.cumsum(mask), shown).astype(np.int32), loss_mask=mask,
                turn_ids=turns.astype(np.int32), gen_logprobs=-of_tokens(row, mask, 1.3),
                versions=np.where(mask, 3, -1).astype(np.int32), reward=REWARDS[row], score=REWARDS[row],
                finish_reason=FinishReason.LENGTH if row == 1 else FinishReason.STOP,
            )
        )  # fmt: skip
    batch = batch_from_samples(samples, [GROUPS[row] for row in rows])
    for name, speed in {
        "old_entropies": 1.9,
        "old_logprobs": 0.7,
        "ref_logprobs": 0.4,
        "values": 2.1,
        "advantages": 1.7,
    }.items():
        both = [of_tokens(row, sample.loss_mask, speed) for row, sample in zip(rows, samples, strict=True)]
        sign = 1.0 if name in ("values", "advantages", "old_entropies") else -1.0
        setattr(batch, name, sign * torch.from_numpy(np.concatenate([*both, np.zeros(0, np.float32)])))
    batch.weights = torch.tensor([WEIGHTS[row] for row in rows])
    num_turns = [int(sample.turn_ids.max()) + 1 for sample in samples]
    rewards = [np.cos(3.0 * row + turn) for row, count in zip(rows, num_turns, strict=True) for turn in range(count)]
    batch.turn_rewards = torch.tensor(rewards, dtype=torch.float32)
    batch.baselines = torch.tensor([0.25 * GROUPS[row] for row in rows])
    batch.decoupled_rewards = torch.tensor([math.sin(3.0 * row) for row in rows])
    return batch.check()


def of_tokens(row: int, mask: np.ndarray, speed: float) -> np.ndarray:
    """A number for each model token, 0 for the others."""
    return np.where(mask, 1.1 + np.cos(row + speed * np.cumsum(mask)), 0).astype(np.float32)


def by_sample(batch: Batch, *names: str) -> dict[int, Tensor]:
    """The values of each row's model tokens, with the row's weight."""
    fields = [getattr(batch, name) for name in names]
    assert not any(field[~batch.loss_mask].any() for field in fields)
    return {
        int(sample): torch.cat([*(field[batch.loss_mask & (batch.row_ids == row)] for field in fields), weight[None]])
        for row, (sample, weight) in enumerate(zip(batch.sample_ids, batch.weights, strict=True))
    }


# -- advantage estimators

COMMON: dict[str, Any] = {
    "whiten_advantages": True, "max_len_mask": True, "difficulty_loss_weight": True, "length_loss_weight": True,
}  # fmt: skip
OF_TOKENS: dict[str, Any] = {"kl_reward_coef": 0.1, "whiten_rewards": True}
CREDITS: list[Any] = [
    GRPO(),
    GDPO(),
    RLOO(),
    ReMax(),
    RaftPlusPlus(),
    ReinforcePlusPlus(gamma=0.9),
    Reinforce(gamma=0.9, norm_mean_type="batch", norm_std_type="group"),
    Reinforce(gamma=0.9, norm_mean_type="running", norm_std_type="running"),
    Reinforce(gamma=0.9, norm_mean_type="all", norm_std_type="all"),
    GAE(gamma=0.9, lambd=0.8),
    TurnGAE(gamma=0.9, lambd=0.8),
    TurnReinforce(gamma=0.9),
    TurnReinforce(gamma=0.9, norm_mean_type="group", norm_std_type="group"),
    GiGPO(step_weight=2.0),
]


def on_ranks(section: PolicyLoss, parts: list[Batch], sums: bool = True) -> tuple[dict[int, Tensor], dict[str, float]]:
    """(values of each row, statistics) with each part on its own rank; sums=False: without sums over ranks."""
    table = replace(RewardTable.of(rows_of(ALL)), domains={"a": [1, 3], "b": [2]})

    def assign(part: Batch, all_sum: AllSum) -> Stats:
        credit = make_pair(section).estimator
        assert credit is not None
        return credit.assign(part, table, all_sum)

    found = together(parts, assign, sums)
    rows = [by_sample(part, "advantages", "returns") for part in parts]
    return {sample: values for part in rows for sample, values in part.items()}, flatten(merge(found))


def together(parts: list[Part], do: Callable[[Part, AllSum], Found], sums: bool = True) -> list[Found]:
    """The results for each part, on its own rank; sums=False: without sums over ranks."""
    barrier, slots = threading.Barrier(len(parts)), [torch.zeros(0)] * len(parts)
    found: list[Any] = [None for _ in parts]

    def all_sum_of(rank: int) -> Callable[[Tensor], Tensor]:
        def all_sum(tensor: Tensor) -> Tensor:
            slots[rank] = tensor
            barrier.wait(60)
            total = sum(slots, torch.zeros_like(tensor))
            barrier.wait(60)
            return total

        return all_sum if sums else lambda tensor: tensor

    def work(rank: int) -> None:
        found[rank] = do(parts[rank], all_sum_of(rank))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


def with_common(section: Any) -> Any:
    return section.model_copy(update=COMMON | ({} if isinstance(section, TurnLoss) else OF_TOKENS))


def test_every_advantage_estimator_is_tested() -> None:
    assert {section.advantage_estimator for section in CREDITS} == set(ALGORITHMS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("section", CREDITS, ids=lambda section: section.advantage_estimator)
def test_advantages_do_not_depend_on_row_order_prompts_or_ranks(section: Any, layout: str) -> None:
    longer, parts = LAYOUTS[layout]
    rows, stats = on_ranks(with_common(section), [rows_of(ALL)])
    other, other_stats = on_ranks(with_common(section), [rows_of(part, longer) for part in parts])
    assert other.keys() == rows.keys() and max(float(values.abs().max()) for values in rows.values()) > 0.5
    for sample, values in rows.items():
        torch.testing.assert_close(other[sample], values, rtol=1e-5, atol=1e-5)
    assert other_stats == pytest.approx(stats, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("section", CREDITS, ids=lambda section: section.advantage_estimator)
def test_advantage_comparison_notices_whitening_on_one_rank(section: Any) -> None:
    """A rank that whitens only its own tokens is noticed."""
    parts = [rows_of(rows) for rows in LAYOUTS["three ranks"][1]]
    rows, _ = on_ranks(with_common(section), [rows_of(ALL)])
    other, _ = on_ranks(with_common(section), parts, sums=False)
    assert max(float((other[sample] - values).abs().max()) for sample, values in rows.items()) > 1e-2


# -- losses

LEVELS = ("token", "turn", "geometric", "sequence")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
RATIOS = [
    {"surrogate": name, "ratio_level": level}
    for name in SURROGATES
    for level in (LEVELS if "ratio_level" in SURROGATE_KEYS[name] else ("token",))
]
CORRECTIONS = [{"correction": "none"}] + [
    {"correction": kind, "correction_level": level} for kind in ("truncate", "mask", "reject") for level in LEVELS
]
CORRECTIONS += [
    {"correction": kind, "rejection_level": level, "rejection_low": 0.6, "rejection_high": 1.6}
    for kind, level in zip(("truncate", "mask", "truncate", "mask"), LEVELS, strict=True)
]
CORRECTIONS += [each | {"correction_normalize": True} for each in CORRECTIONS[1:]]
OTHERS: dict[str, Any] = {
    "cov_share": 0.2, "cov_low": -0.5, "off_policy_mask": 0.3, "entropy_share": 0.7, "kl_loss_estimator": "k3_weighted",
    "num_mini_batches": 2, "kl_loss_coef": 0.3, "entropy_loss_coef": 0.1, "correction_low": 0.4, "correction_high": 1.8,
    "loss_norm_tokens": 12,
}  # fmt: skip
LOSSES = [
    GRPO(**OTHERS, **ratio, **correction, loss_aggregation=aggregation)
    for (ratio, aggregation), correction in zip(
        itertools.product(RATIOS, AGGREGATIONS), itertools.cycle(CORRECTIONS), strict=False
    )
]
"""Every ratio with every aggregation; over them, every correction."""


def loss_of(
    section: PolicyLoss, parts: list[Batch], norms: Norms
) -> tuple[Tensor, dict[int, Tensor], dict[str, float]]:
    """(loss, gradient of each row's log-probs, statistics) of these micro-batches, each on its own rank."""
    objective, total, gradients = make_pair(section).objective, torch.zeros(()), {}
    stats = together(parts, objective.prepare)
    for part in parts:
        logprobs = part.old_logprobs + 0.2 * torch.sin(5 * part.old_logprobs)
        logprobs = logprobs.detach().requires_grad_()
        loss, of_part = objective.loss(Outputs(logprobs, entropy=2 + part.old_logprobs), part, norms)
        loss.backward()
        assert logprobs.grad is not None
        part.returns = logprobs.grad
        total, gradients, stats = total + loss.detach(), gradients | by_sample(part, "returns"), [*stats, of_part]
    return total, gradients, flatten(merge(stats))


def test_every_correction_is_tested() -> None:
    assert all(any(each.items() <= dict(loss).items() for loss in LOSSES) for each in CORRECTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_does_not_depend_on_row_order_prompts_or_micro_batches(layout: str) -> None:
    longer, parts = LAYOUTS[layout]
    norms = whole_norms()
    for section, (loss, gradients, stats) in zip(LOSSES, whole_losses(), strict=True):
        other, other_gradients, other_stats = loss_of(section, [rows_of(part, longer) for part in parts], norms)
        torch.testing.assert_close(other, loss, rtol=1e-5, atol=1e-6, msg=str(section))
        for sample, gradient in gradients.items():
            torch.testing.assert_close(other_gradients[sample], gradient, rtol=1e-5, atol=1e-6, msg=str(section))
        assert other_stats == pytest.approx(stats, rel=1e-5, abs=1e-6), section


def test_loss_comparison_notices_means_per_micro_batch() -> None:
    """A mean of per-micro-batch means is noticed."""
    parts = [rows_of(ALL[:3]), rows_of(ALL[3:])]
    for section in (GRPO(), GRPO(loss_aggregation="seq-mean-token-mean")):
        whole = loss_of(section, [rows_of(ALL)], whole_norms())[0]
        own = [loss_of(section, [part], norms_of(part))[0] for part in parts]
        assert abs(sum(own) / 2 - whole) > 1e-3
    section = GRPO(correction="truncate", correction_normalize=True)
    together(parts, make_pair(section).objective.prepare, sums=False)
    assert abs(parts[0].correction_scale[0] - parts[1].correction_scale[0]) > 1e-3


def norms_of(batch: Batch) -> Norms:
    tokens = batch.loss_mask * batch.weights[batch.row_ids]
    has_tokens = torch.bincount(batch.row_ids[batch.loss_mask], minlength=batch.num_sequences) > 0
    return Norms(float(tokens.sum()), float((batch.weights * has_tokens).sum()))


def whole_norms() -> Norms:
    return norms_of(rows_of(ALL))


@functools.cache
def whole_losses() -> list[tuple[Tensor, dict[int, Tensor], dict[str, float]]]:
    return [loss_of(section, [rows_of(ALL)], whole_norms()) for section in LOSSES]
