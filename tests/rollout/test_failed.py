"""Episodes whose environment has failed: nothing is learned from them, and no group member is compared with them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcrl.algorithms.interface import RewardTable
from hpcrl.algorithms.spec import GRPO, RLOO, Reinforce
from hpcrl.rollout.scheduling.events import Decoded, Rewarded
from hpcrl.rollout.scheduling.policies import SchedulerConfig
from hpcrl.rollout.scheduling.scheduler import RolloutScheduler
from hpcrl.rollout.types import FinishReason
from hpcrl.workers.trainer import _fill_advantages
from tests.algorithms.pairs import make_pair
from tests.algorithms.test_algorithms import make_batch
from tests.rollout.test_greedy import greedy_of
from tests.rollout.test_policies import ids, started

ONE_RANK: Any = SimpleNamespace(all_gather=lambda tensor: tensor, all_sum=lambda tensor: tensor)
MASKS = [[0, 1, 1], [0, 0, 1], [0, 1], [0, 1, 1], [0, 1]]
REWARDS, GROUPS = [-1.0, -3.0, 0.0, -2.0, -4.0], [4, 4, 4, 9, 9]


def played(rewards: dict[int, float | None]) -> list[Any]:
    """These samples end on replica 0 with these rewards; None: their environment has failed."""
    decoded = Decoded(0, tuple((sample, 5 if reward is not None else 1, FinishReason.STOP)
                               for sample, reward in rewards.items()))  # fmt: skip
    return [decoded, *(
        Rewarded(sample, 0.0, 0.0, "environment class: KeyError", failed=True) if reward is None
        else Rewarded(sample, reward, reward) for sample, reward in rewards.items()
    )]  # fmt: skip


@pytest.mark.parametrize("section", [GRPO(), RLOO(), Reinforce(whiten_advantages=True)])
def test_a_failed_episode_has_no_weight_and_is_not_part_of_the_baseline(section: Any) -> None:
    """The third row has failed; with returns below 0 its reward of 0 would be the best of its group."""
    batch, _ = make_batch(MASKS, REWARDS, GROUPS)
    batch.failed = torch.tensor([False, False, True, False, False])
    without = batch.select([0, 1, 3, 4])
    credit = make_pair(section).estimator
    credit.assign(without, RewardTable.of(without), ONE_RANK.all_sum)
    _fill_advantages(credit, batch, RewardTable.of(batch), ONE_RANK)
    assert batch.weights.tolist() == [1, 1, 0, 1, 1]
    assert not batch.advantages[6:8].any() and batch.advantages.shape == batch.loss_mask.shape
    assert torch.equal(batch.select([0, 1, 3, 4]).advantages, without.advantages)
    plain, _ = make_batch(MASKS, REWARDS, GROUPS)
    _fill_advantages(credit, plain, RewardTable.of(plain), ONE_RANK)
    assert not torch.equal(plain.select([0, 1, 3, 4]).advantages, without.advantages), "else the test shows nothing"
    assert bool(batch.check().advantages.isfinite().all())


def test_a_step_with_only_failed_episodes_trains_nothing() -> None:
    batch, _ = make_batch(MASKS, REWARDS, GROUPS)
    batch.failed = torch.ones(5, dtype=torch.bool)
    _fill_advantages(make_pair(GRPO()).estimator, batch, RewardTable.of(batch), ONE_RANK)
    assert not batch.weights.any() and not batch.advantages.any()


def test_a_spare_member_replaces_a_failed_one() -> None:
    """Although it ended with fewer tokens, which decide which members are spare."""
    scheduler, _ = started(SchedulerConfig(2, extra_members=1), 1, {0: 8})
    a, b, c = ids(0, 3)
    scheduler.plan([*played({a: None, b: 1.0, c: 0.0})])
    (group,) = scheduler.take_batch()
    assert [sample.id for sample in group.samples] in ([b, c], [a, b]) and not group.samples[-1].failed


def test_filters_ignore_failed_episodes() -> None:
    scheduler, _ = started(SchedulerConfig(3, filter_std=True, max_attempts=1), 1, {0: 8})
    scheduler.plan(played(dict(zip(ids(0, 3), [None, 1.0, 1.0], strict=True))))
    assert not scheduler.ready(), "equal rewards, of which the failed one is none"


def test_a_failed_greedy_response_is_not_used_as_baseline() -> None:
    scheduler, _ = started(SchedulerConfig(2, greedy_baseline=True), 1, {0: 8})
    a, b = ids(0, 2)
    commands = scheduler.plan(played({a: 1.0, b: 0.0, greedy_of(0): None}))
    assert not scheduler.ready() and commands[-1].sample_ids == (*ids(0, 2, attempt=1), greedy_of(0, 1))


def test_a_checkpoint_keeps_the_failed_flag() -> None:
    config = SchedulerConfig(2, max_staleness=1)
    scheduler, _ = started(config, 1, {0: 8})
    scheduler.plan(played(dict(zip(ids(0, 2), [None, 1.0], strict=True))))
    resumed = RolloutScheduler(config, {0: 8})
    resumed.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    assert [sample.failed for sample in resumed.finished()[0].samples] == [True, False]
