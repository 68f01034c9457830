"""The scheduler's policies one by one: spare members, freshness, restarts, routing."""

from __future__ import annotations

import random

import pytest

from hpcrl.rollout.replica_speeds import ReplicaSpeeds
from hpcrl.rollout.scheduling.events import (
    Aborted,
    Decoded,
    Drop,
    Generate,
    ReplicaLost,
    Rewarded,
    SamplesFailed,
    SpeedChanged,
)
from hpcrl.rollout.scheduling.policies import Lengths, SchedulerConfig
from hpcrl.rollout.scheduling.scheduler import RolloutExhausted, RolloutScheduler
from hpcrl.rollout.types import FinishReason, make_sample_id

STOP = FinishReason.STOP


def started(config, uids, replicas, need=1, kind_of=lambda uid: ""):
    scheduler = RolloutScheduler(config, replicas, kind_of)
    scheduler.begin_step(0, need)
    scheduler.add_prompts(range(uids))
    return scheduler, scheduler.plan()


def ids(uid, members, attempt=0):
    return tuple(make_sample_id(uid, attempt, member) for member in range(members))


def ended(*samples, replica=0, tokens=5):
    """Events of samples that finish and are scored at once."""
    scored = [Rewarded(sample, 1.0, 1.0) for sample in samples]
    return [Decoded(replica, tuple((sample, tokens, STOP) for sample in samples)), *scored]


def counted(scheduler, name):
    return scheduler.metrics()[f"scheduler/{name}"][0]


def test_the_first_finished_members_form_the_group_and_the_last_is_dropped():
    scheduler, commands = started(SchedulerConfig(2, extra_members=1), 1, {0: 8})
    a, b, c = ids(0, 3)
    assert commands == [Generate(0, (a, b, c))]
    assert scheduler.plan(ended(c)) == [] and not scheduler.ready()
    assert scheduler.plan(ended(a)) == [Drop(0, (b,))]
    scheduler.plan([Aborted(((b, 40),))])
    (group,) = scheduler.take_batch()
    assert [sample.id for sample in group.samples] == [a, c]
    metrics = scheduler.metrics()
    assert metrics["scheduler/redundant"][0] == 1
    assert metrics["scheduler/kept_length"][:2] == (10, 2) and metrics["scheduler/aborted_length"][:2] == (40, 1)
    assert scheduler.plan(ended(b)) == []  # stale


def test_a_spare_member_replaces_one_that_fails():
    for extra, attempt in ((1, 0), (0, 1)):
        scheduler, _ = started(SchedulerConfig(2, extra_members=extra), 1, {0: 8})
        members = ids(0, 2 + extra)
        commands = scheduler.plan([SamplesFailed(members[:1], "its environment crashed")])
        if attempt:
            assert commands == [Drop(0, members), Generate(0, ids(0, 2, attempt=1))]
        else:
            assert commands == [Drop(0, members[:1])]
            scheduler.plan(ended(*members[1:]))
            assert [sample.id for sample in scheduler.take_batch()[0].samples] == [*members[1:]]


def test_spare_members_survive_the_loss_of_a_replica():
    config = SchedulerConfig(2, extra_members=1, group_affinity=False)
    scheduler, commands = started(config, 1, {0: 4, 1: 4, 2: 4})
    assert {command.replica: len(command.sample_ids) for command in commands} == {0: 1, 1: 1, 2: 1}
    homes = {command.replica: command.sample_ids[0] for command in commands}
    assert scheduler.plan([ReplicaLost(1)]) == []
    scheduler.plan([*ended(homes[0]), *ended(homes[2], replica=2)])
    assert scheduler.ready() and scheduler.take_batch()[0].attempt == 0


@pytest.mark.parametrize("on_stale", ["wait", "cancel"])
def test_a_straggler_is_awaited_or_cancelled(on_stale):
    """Prompt 0 takes longer than a step; with max_staleness=1 it may be trained at version 1 at the latest."""
    scheduler, _ = started(SchedulerConfig(1, max_staleness=1, on_stale=on_stale), 3, {0: 8})
    scheduler.plan(ended(*ids(1, 1)))
    assert [group.uid for group in scheduler.take_batch()] == [1]
    scheduler.begin_step(1, 1)
    assert scheduler.plan() == [Generate(0, ids(2, 1))]
    scheduler.plan(ended(*ids(2, 1)))
    if on_stale == "wait":
        assert not scheduler.ready()
        scheduler.plan(ended(*ids(0, 1)))
        assert [group.uid for group in scheduler.take_batch()] == [0]
    else:
        assert [group.uid for group in scheduler.take_batch()] == [2]
        scheduler.begin_step(2, 1)
        assert scheduler.plan() == [Drop(0, ids(0, 1)), Generate(0, ids(0, 1, attempt=1))]
    assert counted(scheduler, "cancelled") == (on_stale == "cancel")


def test_new_weights_restart_running_samples():
    config = SchedulerConfig(2, max_staleness=1, on_new_weights="restart", max_attempts=2)
    scheduler, _ = started(config, 2, {0: 8})
    (a, b), (c, d) = ids(0, 2), ids(1, 2)
    scheduler.plan(ended(a, b, c))
    scheduler.take_batch()
    scheduler.begin_step(1, 1)
    again = make_sample_id(1, 1, 1)
    assert scheduler.plan() == [Drop(0, (d,)), Generate(0, (again,))]  # the other member has ended and stays
    scheduler.plan(ended(again))
    (group,) = scheduler.take_batch()
    assert [sample.id for sample in group.samples] == [c, again]
    assert (group.attempt, group.version) == (1, 0), "as old as its oldest response"
    assert counted(scheduler, "restarted") == 1


def test_restarts_end_after_max_attempts_and_make_a_group_fresh():
    config = SchedulerConfig(1, max_staleness=4, on_new_weights="restart", max_attempts=2)
    scheduler, _ = started(config, 1, {0: 1})
    for version in range(1, 5):
        scheduler.begin_step(version, 1)
        commands = scheduler.plan()
        assert bool(commands) == (version <= 2)
    scheduler.plan(ended(make_sample_id(0, 2, 0)))
    (group,) = scheduler.take_batch()
    assert (group.version, group.attempt) == (2, 2)


def test_recomputed_samples_are_not_restarted():
    scheduler, _ = started(SchedulerConfig(1, max_staleness=1, on_new_weights="recompute"), 1, {0: 8})
    scheduler.begin_step(1, 1)
    assert scheduler.plan() == []


def test_a_slow_replica_gets_fewer_samples():
    scheduler, _ = started(SchedulerConfig(1), 0, {0: 8, 1: 8}, need=12)
    scheduler.plan([SpeedChanged(1, 0.5)])
    scheduler.add_prompts(range(12))
    commands = scheduler.plan()
    assert {command.replica: len(command.sample_ids) for command in commands} == {0: 8, 1: 4}


def test_a_replica_speed_is_reported_when_it_changes_and_settles():
    pace = ReplicaSpeeds()
    assert [pace.observe(name, 8, 1.0) for name in (0, 1, 2)] == [[], [], []]
    told = [
        event for _ in range(100) for name in (0, 1, 2) for event in pace.observe(name, 8, 3.0 if name == 1 else 1.0)
    ]
    assert {event.replica for event in told} == {1}, "the median is no slower"
    assert told[-1].speed == pytest.approx(1 / 3, rel=0.3) and len(told) < 8


@pytest.mark.parametrize(("slow", "fast"), [((1,), (0,)), ((1, 2), (0, 3))])
def test_slow_replicas_get_less_even_if_they_are_half(slow, fast):
    """The median is a fast replica, so the slow ones get less."""
    pace, speeds = ReplicaSpeeds(), {}
    for name in [*slow, *fast] * 200:
        speeds |= {event.replica: event.speed for event in pace.observe(name, 8, 10.0 if name in slow else 1.0)}
    assert all(speeds[name] < 0.2 for name in slow) and all(speeds.get(name, 1.0) > 0.8 for name in fast)


def test_a_replica_with_more_samples_does_not_count_as_slow():
    rng, pace = random.Random(0), ReplicaSpeeds()
    told = []
    for name, most in [(0, 32), (1, 4), (2, 4)] * 300:
        tokens = rng.randrange(1, most + 1)
        told += pace.observe(name, tokens, 0.002 + 0.004 * tokens)
    assert not [event for event in told[50:] if not 0.8 < event.speed < 1.25]


def test_group_members_spread_over_replicas_or_stay_together():
    for complete_groups, spread in ((True, {0: 4}), (False, {0: 2, 1: 2})):
        _, commands = started(SchedulerConfig(4, group_affinity=complete_groups), 1, {0: 8, 1: 8})
        assert {command.replica: len(command.sample_ids) for command in commands} == spread


def test_replica_load_is_weighted_by_expected_length():
    """After responses of 90 tokens to even prompts and of 10 to odd ones, an even prompt weighs nine times as much."""
    loads = {}
    for routing in ("count", "expected_length"):
        kind = lambda uid: "even" if uid % 2 == 0 else "odd"  # noqa: E731
        scheduler, _ = started(SchedulerConfig(1, routing=routing), 2, {0: 16, 1: 16}, need=2, kind_of=kind)
        scheduler.plan([*ended(*ids(0, 1), tokens=90), *ended(*ids(1, 1), replica=1, tokens=10)])
        scheduler.take_batch()
        scheduler.begin_step(1, 8)
        scheduler.add_prompts([2, 3, 5, 7, 9, 11, 13, 15])  # one even prompt
        commands = scheduler.plan()
        loads[routing] = {command.replica: len(command.sample_ids) for command in commands}
    assert loads == {"count": {0: 4, 1: 4}, "expected_length": {0: 1, 1: 7}}


def test_recent_lengths_have_more_weight():
    lengths = Lengths()
    assert lengths.expected("a") == 1.0
    for length in [10] * 100 + [30] * 100:
        lengths.observe("a", length)
        lengths.observe("b", 60)
    assert lengths.expected("a") / lengths.expected("b") == pytest.approx(0.5, rel=0.02)


def test_a_restarted_prompt_goes_to_the_replica_with_its_prefix():
    for affinity, replica in ((True, 0), (False, 1)):
        scheduler, _ = started(SchedulerConfig(1, prompt_affinity=affinity), 3, {0: 8, 1: 8}, need=3)
        scheduler.plan(ended(*ids(1, 1), replica=1))
        assert scheduler.plan([SamplesFailed(ids(0, 1), "refused")])[-1] == Generate(replica, ids(0, 1, attempt=1))
        assert ("scheduler/prefix_kept" in (metrics := scheduler.metrics())) == affinity
        assert not affinity or metrics["scheduler/prefix_kept"][0] == 1


def test_too_few_replicas_end_the_run():
    scheduler, _ = started(SchedulerConfig(1, min_replicas=2), 1, {0: 8, 1: 8, 2: 8})
    scheduler.plan([ReplicaLost(0)])
    with pytest.raises(RolloutExhausted, match=r"1 generator replicas are left, rollout\.min_replicas=2"):
        scheduler.plan([ReplicaLost(2)])
