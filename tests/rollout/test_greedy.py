"""The greedy baseline of a group: generated and scored with it, its reward kept, its tokens dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpcrl.messaging.messages import Sampling
from hpcrl.rollout.admission import admissions
from hpcrl.rollout.scheduling.events import Decoded, Drop, Generate, Rewarded, SamplesFailed
from hpcrl.rollout.scheduling.policies import SchedulerConfig
from hpcrl.rollout.scheduling.scheduler import RolloutScheduler
from hpcrl.rollout.types import GREEDY_MEMBER, FinishReason, Prompt, is_greedy, make_sample_id
from tests.rollout.test_policies import ids, started


def greedy_of(uid: int, attempt: int = 0) -> int:
    return make_sample_id(uid, attempt, GREEDY_MEMBER)


def ended(rewards: dict[int, float]) -> list[Any]:
    """These samples end on replica 0 with these rewards."""
    scored = [Rewarded(sample, reward, reward) for sample, reward in rewards.items()]
    return [Decoded(0, tuple((sample, 5, FinishReason.STOP) for sample in rewards)), *scored]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("greedy_last", [False, True])
def test_a_group_waits_for_its_greedy_sample_and_keeps_only_the_reward(deterministic: bool, greedy_last: bool) -> None:
    config = SchedulerConfig(2, greedy_baseline=True, deterministic=deterministic)
    scheduler, commands = started(config, 1, {0: 8})
    (a, b), greedy = ids(0, 2), greedy_of(0)
    assert commands == [Generate(0, (a, b, greedy))]
    parts = [{a: 1.0, b: 0.0}, {greedy: 0.5}]
    first, last = parts if greedy_last else parts[::-1]
    scheduler.plan(ended(first))
    assert not scheduler.ready()
    assert scheduler.plan(ended(last)) == [Drop(0, (greedy,))] and scheduler.ready()
    (group,) = scheduler.take_batch()
    assert [sample.id for sample in group.samples] == [a, b] and group.baseline == 0.5
    (end,) = scheduler.ended_prompts()
    assert end.rewards == (1.0, 0.0)
    metrics = scheduler.metrics()
    assert metrics["scheduler/kept_length"][1] == 2 and metrics["scheduler/redundant"][0] == 0
    assert metrics["scheduler/aborted"][0] == 0, "it ended, and nothing of it was wasted"


def test_greedy_sample_is_not_a_spare_member() -> None:
    scheduler, _ = started(SchedulerConfig(2, extra_members=1, greedy_baseline=True), 1, {0: 8})
    a, b, c = ids(0, 3)
    assert scheduler.plan(ended({a: 1.0, b: 1.0, c: 1.0})) == [] and not scheduler.ready()
    assert scheduler.plan(ended({greedy_of(0): 0.0})) == [Drop(0, (c, greedy_of(0)))]
    assert [sample.id for sample in scheduler.take_batch()[0].samples] == [a, b]

    scheduler, _ = started(SchedulerConfig(2, extra_members=1, greedy_baseline=True), 1, {0: 8})
    again = Generate(0, (*ids(0, 3, attempt=1), greedy_of(0, 1)))
    assert scheduler.plan([SamplesFailed((greedy_of(0),), "its environment crashed")])[-1] == again


@pytest.mark.parametrize(("baseline", "kept"), [(1.0, False), (0.0, True)])
def test_equal_rewards_give_a_signal_if_the_baseline_differs(baseline: float, kept: bool) -> None:
    scheduler, _ = started(SchedulerConfig(2, filter_std=True, greedy_baseline=True), 1, {0: 8})
    scheduler.plan(ended({**dict.fromkeys(ids(0, 2), 1.0), greedy_of(0): baseline}))
    assert scheduler.ready() == kept


@pytest.mark.parametrize("done", [(), (0,)])
def test_group_rewards_score_the_greedy_sample_with_its_group(done: tuple[int, ...]) -> None:
    """done: members that needed no scorer."""
    scheduler, _ = started(SchedulerConfig(2, extra_members=1, greedy_baseline=True), 1, {0: 8})
    (a, b, c), greedy = ids(0, 3), greedy_of(0)
    scheduler.plan([Decoded(0, tuple((sample, 5, FinishReason.STOP) for sample in (a, b, c)))])
    scheduler.plan([Rewarded((a, b, c)[member], 0.0, 0.0) for member in done])
    waiting = [sample for member, sample in enumerate((a, b, c)) if member not in done]
    assert scheduler.complete_groups(waiting) == ([], []), "without the greedy response the group is not complete"
    scheduler.plan([Decoded(0, ((greedy, 5, FinishReason.STOP),))])
    assert scheduler.complete_groups([*waiting, greedy]) == ([[*waiting[: 2 - len(done)], greedy]], [])


def test_a_pending_group_keeps_its_baseline_in_a_checkpoint() -> None:
    config = SchedulerConfig(2, greedy_baseline=True, max_staleness=1)
    scheduler, _ = started(config, 1, {0: 8})
    scheduler.plan(ended({**dict.fromkeys(ids(0, 2), 1.0), greedy_of(0): 0.25}))
    state = json.loads(json.dumps(scheduler.state_dict()))
    resumed = RolloutScheduler(config, {0: 8})
    resumed.load_state_dict(state)
    assert [group.baseline for group in resumed.finished()] == [0.25]
    assert resumed.finished() == scheduler.finished()
    del state["finished"][0]["baseline"]  # as an earlier version wrote it
    resumed = RolloutScheduler(config, {0: 8})
    resumed.load_state_dict(state)
    assert resumed.finished()[0].baseline is None


def test_only_the_baseline_sample_is_decoded_greedily() -> None:
    sampling = Sampling(16, 0.7, 0.9, 5, 0.1, ["stop"])
    prompts = {uid: Prompt(uid, "default", 0, uid, (1, 2), "text") for uid in (0, 1)}
    samples = [*ids(0, 2), greedy_of(0), *ids(1, 2), greedy_of(1)]
    sampled, greedy = admissions(samples, prompts, sampling, seed=3)
    assert [sample for sample, _ in sampled.samples] == [*ids(0, 2), *ids(1, 2)] and sampled.sampling == sampling
    assert [sample for sample, _ in greedy.samples] == [greedy_of(0), greedy_of(1)]
    assert greedy.sampling == Sampling(16, 0.0, 1.0, 0, 0.0, ["stop"]) and not greedy.sampling.truncates
    assert [prompt.uid for prompt in greedy.prompts] == [0, 1], "they may be on another replica"
    assert not any(map(is_greedy, ids(0, 2)))
    assert [len(message.samples) for message in admissions(ids(0, 2), prompts, sampling, seed=3)] == [2]
