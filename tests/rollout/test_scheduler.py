"""The rollout scheduler against a simulated world: unit tests and properties over random orders of events."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hpcrl.config import Config
from hpcrl.rollout.scheduling.events import (
    ENV_LOST,
    Aborted,
    Answered,
    Continue,
    Decoded,
    Drop,
    Generate,
    ReplicaLost,
    Rewarded,
    SamplesFailed,
    ScorerLost,
    SendToScorer,
    SpeedChanged,
)
from hpcrl.rollout.scheduling.policies import SchedulerConfig
from hpcrl.rollout.scheduling.scheduler import RolloutExhausted, RolloutScheduler
from hpcrl.rollout.types import FinishReason, PromptOutcome, make_sample_id, split_sample_id

STOP = FinishReason.STOP
SEARCH = settings(deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))  # a seed cannot be shrunk


@dataclass
class World:
    """Replicas, scorers and environments with outcomes that depend only on the sample id."""

    rng: random.Random
    deterministic: bool
    capacities: dict[int, int]
    pass_rate: float = 0.5
    error_rate: float = 0.0
    max_turns: int = 1
    clock: int = 0  # decode chunks so far
    held: dict[int, dict[int, int]] = field(default_factory=dict)  # replica -> sample -> turns done
    running: dict[int, dict[int, int]] = field(default_factory=dict)  # replica -> sample -> tokens to go
    scoring: set[int] = field(default_factory=set)
    acting: set[int] = field(default_factory=set)
    late: list = field(default_factory=list)
    history: dict[int, list] = field(default_factory=dict)  # replica -> commands, as the replica sees them

    def __post_init__(self):
        self.held = {name: {} for name in self.capacities}
        self.running = {name: {} for name in self.capacities}
        self.history = {name: [] for name in self.capacities}

    def length(self, sample_id: int) -> int:
        return 1 + random.Random(sample_id).randrange(40)

    def score(self, sample_id: int) -> float:
        return float(random.Random(sample_id * 7 + 1).random() < self.pass_rate)

    def error(self, sample_id: int) -> str:
        return "timeout" if random.Random(sample_id * 11 + 5).random() < self.error_rate else ""

    def carry_out(self, commands) -> None:
        for command in commands:
            name, ids = command.replica, command.sample_ids
            assert name in self.held, f"command to lost replica {name}"
            assert len(set(ids)) == len(ids) > 0
            self.history[name].append((type(command).__name__, ids))
            match command:
                case Generate():
                    for i in ids:
                        assert all(i not in held for held in self.held.values()), "admitted twice"
                        self.held[name][i] = 0
                        self.running[name][i] = self.length(i)
                case Continue():
                    for i in ids:
                        assert i not in self.running[name] and i in self.held[name]
                        self.running[name][i] = self.length(i + self.held[name][i])
                case SendToScorer():
                    for i in ids:
                        assert i in self.held[name]
                        self.scoring.add(i)
                case Drop():
                    for i in ids:
                        del self.held[name][i]
                    cut = tuple((i, 3) for i in ids if self.running[name].pop(i, None) is not None)
                    if cut:
                        self.late.append(Aborted(cut))
            if not self.deterministic:
                assert len(self.running[name]) <= self.capacities[name]

    def decode_chunk(self, name: int) -> Decoded | None:
        """One decode chunk of eight tokens on a replica."""
        if not self.running[name]:
            return None
        finished, turns = [], []
        for i in list(self.running[name]):
            self.running[name][i] -= 8
            if self.running[name][i] <= 0:
                del self.running[name][i]
                self.held[name][i] += 1
                if self.held[name][i] < 1 + i % self.max_turns:
                    turns.append((i, self.length(i)))
                    self.acting.add(i)
                else:
                    finished.append((i, self.length(i), STOP))
                    self.scoring.add(i)
        return Decoded(name, tuple(finished), tuple(turns))

    def lose(self, name: int) -> ReplicaLost:
        del self.held[name], self.running[name]
        return ReplicaLost(name)

    def random_events(self) -> list:
        """Some of the possible next events; now and then none, rarely invalid ones."""
        events = []
        for name in self.rng.sample(list(self.running), self.rng.randint(0, len(self.running))):
            if decode_chunk := self.decode_chunk(name):
                events.append(decode_chunk)
        for i in self.some(self.scoring):
            events.append(Rewarded(i, self.score(i), self.score(i), self.error(i), failed=bool(self.error(i))))
        if answered := self.some(self.acting):
            events.append(Answered(tuple(answered)))
        self.rng.shuffle(events)
        late, self.late = self.late, []
        return events + late

    def some(self, pool: set[int]) -> list[int]:
        chosen = self.rng.sample(sorted(pool), self.rng.randint(0, len(pool)))
        pool.difference_update(chosen)
        return chosen


def in_flight(scheduler) -> int:
    """Groups that were started and have no outcome."""
    return len(scheduler._open)


def run_steps(scheduler, world, need, steps, disturb=None, break_hand_over=None):
    """Run whole steps and check the budget at every iteration. Returns the batches and the prompts' outcomes."""
    batches, ends, next_uid = [], [], 0
    for version in range(steps):
        scheduler.begin_step(version, need)
        for turn in range(5_000):
            if scheduler.ready():
                batch = scheduler.take_batch()
                if not (break_hand_over and break_hand_over()):
                    break
                scheduler.return_batch()
            next_uid = run_turn(scheduler, world, next_uid, disturb if turn else None)
            assert in_flight(scheduler) + len(scheduler.finished()) <= scheduler.budget
        else:
            raise AssertionError("no batch after 5,000 turns")
        batches.append(batch)
        for group in batches[-1]:
            for sample in group.samples:
                del world.held[sample.replica][sample.id]  # the tokens live where the group says
        redundant = scheduler.config.extra_prompts  # that many may be left over
        turns = world.rng.randrange(12) if scheduler.generates_ahead else 0
        arrives = world.rng.randrange(12)
        for turn in range(turns):  # while the trainer works
            if turn == arrives:
                scheduler.weights_arrived(version + 1)
            scheduler.pause(frozenset(name for name in world.held if world.rng.random() < 0.3))  # those that train
            next_uid = run_turn(scheduler, world, next_uid, disturb)
            assert in_flight(scheduler) + len(scheduler.finished()) <= scheduler.budget + redundant
        scheduler.pause(frozenset())
        ends += scheduler.ended_prompts()
    return batches, ends, next_uid


def run_turn(scheduler, world, next_uid, disturb=None):
    """Offer what is wanted, tell what happened, carry out what follows. Returns the next fresh uid."""
    fresh = range(next_uid, next_uid + scheduler.num_wanted())
    scheduler.add_prompts(fresh)
    events = world.random_events()
    if disturb:
        events += disturb(scheduler, world)
    world.carry_out(scheduler.plan(events))
    return next_uid + len(fresh)


def check_accounting(scheduler, batches, ends, offered):
    """Every prompt ended once or still waits; none trained twice; trained is what was taken."""
    times = Counter(end.uid for end in ends)
    assert not times or max(times.values()) == 1
    state = scheduler.state_dict()
    waiting = {uid for uid, _, _ in state["queue"]} | {group["uid"] for group in state["finished"]}
    assert waiting | set(times) == set(range(offered)) and not waiting & set(times)
    taken = [group.uid for batch in batches for group in batch]
    assert sorted(taken) == sorted(end.uid for end in ends if end.outcome is PromptOutcome.TRAINED)


# -- properties


@pytest.mark.slow
@settings(SEARCH, max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    replicas=st.integers(1, 4),
    capacity=st.integers(1, 9),
    group_size=st.integers(1, 4),
    need=st.integers(1, 5),
    extra_prompts=st.integers(0, 4),
    deterministic=st.booleans(),
    max_turns=st.integers(1, 3),
    max_staleness=st.sampled_from([0, 0, 0.5, 1, 2, 3.5]),
    policies=st.fixed_dictionaries(
        {
            "extra_members": st.integers(0, 2),
            "on_stale": st.sampled_from(["wait", "cancel"]),
            "on_new_weights": st.sampled_from(["continue", "recompute", "restart"]),
            "max_attempts": st.sampled_from([1, 3, 10]),
            "group_affinity": st.booleans(),
            "prompt_affinity": st.booleans(),
            "routing": st.sampled_from(["count", "expected_length"]),
            "greedy_baseline": st.booleans(),
            "restart_failed_episodes": st.booleans(),
        }
    ),
    chaos=st.booleans(),
)
def test_accounting_and_budget_hold_and_steps_end_under_random_events(
    seed, replicas, capacity, group_size, need, extra_prompts, deterministic, max_turns, max_staleness, policies, chaos
):
    rng = random.Random(seed)
    world = World(rng, deterministic, {n: capacity for n in range(replicas)}, error_rate=0.1, max_turns=max_turns)
    config = SchedulerConfig(
        group_size, extra_prompts, filter_std=group_size > 1, deterministic=deterministic, max_staleness=max_staleness,
        max_generated_groups=100_000, **policies,
    )  # fmt: skip
    scheduler = RolloutScheduler(config, world.capacities, kind_of=lambda uid: str(uid % 3))

    def disturb(scheduler, world):
        events = []
        live = sorted(i for held in world.held.values() for i in held)
        if chaos and live and rng.random() < 0.01:
            events.append(SamplesFailed((rng.choice(live),), "crash"))
        if chaos and world.scoring and rng.random() < 0.1:
            lost = world.some(world.scoring)  # the world forgets them, SendToScorer brings them back
            events.append(ScorerLost(tuple(lost)))
        if chaos and rng.random() < 0.1 and live:
            events.append(Rewarded(rng.choice(live), 1.0, 1.0))  # stale, early or doubled
            world.scoring.discard(events[-1].sample_id)
            world.acting.discard(events[-1].sample_id)
        if chaos and rng.random() < 0.1:
            events.append(SpeedChanged(rng.randrange(replicas), rng.choice([0.1, 0.6, 1.5])))
        if chaos and len(world.held) > 1 and rng.random() < 0.02:
            events.append(world.lose(rng.choice(sorted(world.held))))
        return events

    def break_hand_over():
        """A replica is lost; the scheduler gets this before it takes the batch back, or with the next events."""
        if not chaos or len(world.held) < 2 or rng.random() < 0.8:
            return False
        lost = world.lose(rng.choice(sorted(world.held)))
        scheduler.handle_events([lost]) if rng.random() < 0.5 else world.late.append(lost)
        return True

    batches, ends, offered = run_steps(scheduler, world, need, 6, disturb, break_hand_over)
    check_accounting(scheduler, batches, ends, offered)
    for version, batch in enumerate(batches):
        assert len(batch) == need and [g.uid for g in batch] == sorted(g.uid for g in batch)
        lags = [version - group.version for group in batch]
        assert (
            max(lags) <= -(-max_staleness // 1)
            and sum(lag > max_staleness // 1 for lag in lags) <= (max_staleness % 1) * need
        )
        for group in batch:
            uids, attempts, members = zip(*(split_sample_id(sample.id) for sample in group.samples), strict=True)
            assert set(uids) == {group.uid} and max(attempts) <= group.attempt
            assert len(set(members)) == group_size and max(members) < group_size + policies["extra_members"]
            assert (group.baseline is not None) == policies["greedy_baseline"]
            restarts = policies["on_new_weights"] == "restart" and max_staleness > 0
            assert len(set(attempts)) == 1 or restarts or policies["restart_failed_episodes"]
    if policies["on_stale"] == "wait" and extra_prompts == 0:
        assert scheduler.metrics()["scheduler/cancelled"][0] == 0
    if max_staleness == 0 or deterministic:
        assert in_flight(scheduler) == 0 and not any(world.running.values()) and not any(world.held.values())


@pytest.mark.slow
@settings(SEARCH, max_examples=60)
@given(
    order=st.integers(0, 2**32),
    extra_prompts=st.integers(0, 3),
    max_turns=st.integers(1, 3),
    greedy=st.booleans(),
)
def test_deterministic_mode_ignores_the_order_of_events(order, extra_prompts, max_turns, greedy):
    """Same outcomes in another order: the same batches, the same ends, the same admissions on every replica."""

    def run(seed):
        world = World(random.Random(seed), True, {0: 4, 1: 4}, error_rate=0.1, max_turns=max_turns)
        config = SchedulerConfig(3, extra_prompts, filter_std=True, deterministic=True, greedy_baseline=greedy)
        scheduler = RolloutScheduler(config, world.capacities)
        batches, ends, _ = run_steps(scheduler, world, 4, 3)
        # without over-sampling nothing is dropped, and the next turns come at the same place too
        kinds = ("Generate",) if extra_prompts else ("Generate", "Continue")
        orders = {name: [order for order in history if order[0] in kinds] for name, history in world.history.items()}
        return batches, ends, orders

    assert run(order) == run(0)


def test_default_mode_depends_on_the_order_of_events():
    """Negative control of the test above: the compared results can differ."""

    def run(seed):
        world = World(random.Random(seed), False, {0: 4, 1: 4})
        scheduler = RolloutScheduler(SchedulerConfig(3, 2, filter_std=True), world.capacities)
        return run_steps(scheduler, world, 4, 3)[0]

    assert len({str(run(seed)) for seed in range(5)}) > 1


@pytest.mark.slow
@settings(SEARCH, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    need=st.integers(1, 4),
    extra_prompts=st.integers(0, 2),
    max_staleness=st.sampled_from([0, 0.5, 1, 2]),
    on_stale=st.sampled_from(["wait", "cancel"]),
    max_attempts=st.integers(1, 2),
    place=st.sampled_from([0, 6, 11]),
)
def test_every_epoch_is_completed_despite_long_samples(
    seed, need, extra_prompts, max_staleness, on_stale, max_attempts, place
):
    """Epochs of twelve rows, one of them, at the same index in each, fifty times as long. The run is killed repeatedly
    and resumes from its last commit. A prompt ends within as many steps as max_attempts and max_staleness allow, so all
    old epochs are closed: each row trained once, the long one as often as others."""
    rng, rows, steps = random.Random(seed), 12, 60
    config = SchedulerConfig(
        2, extra_prompts, max_attempts=max_attempts, max_staleness=max_staleness, on_stale=on_stale
    )
    committed = (0, None, [], 0)  # steps, the scheduler's state, prompts that ended and when, prompts drawn
    while committed[0] < steps:
        done, state, ends, next_uid = committed
        world = World(rng, False, {0: 6, 1: 6}, pass_rate=1.0)
        world.length = lambda sample_id: 400 if split_sample_id(sample_id)[0] % rows == place else 1 + sample_id % 8
        scheduler, killed_after = RolloutScheduler(config, world.capacities), done + rng.randrange(12)
        if state is not None:
            scheduler.load_state_dict(json.loads(state))
        for group in scheduler.finished():
            for sample in group.samples:
                world.held[sample.replica][sample.id] = 1
        for version in range(done, min(steps, killed_after)):
            scheduler.begin_step(version, need)
            while not scheduler.ready():
                next_uid = run_turn(scheduler, world, next_uid)
            for sample in (sample for group in scheduler.take_batch() for sample in group.samples):
                del world.held[sample.replica][sample.id]
            for _ in range(rng.randrange(4) if scheduler.generates_ahead else 0):
                next_uid = run_turn(scheduler, world, next_uid)
            ends = [*ends, *((end.uid, end.outcome, version) for end in scheduler.ended_prompts())]
            if rng.random() < 0.3:
                committed = (version + 1, json.dumps(scheduler.state_dict()), ends, next_uid)
        if killed_after >= steps:
            committed = (steps, json.dumps(scheduler.state_dict()), ends, next_uid)
    _, _, ends, next_uid = committed
    assert {outcome for _, outcome, _ in ends} == {PromptOutcome.TRAINED}
    trained = [uid for uid, _, _ in ends]
    assert len(set(trained)) == len(trained) == steps * need
    patience = 4 * max_attempts * (math.ceil(max_staleness) + 1) + math.ceil(max_staleness) + 2
    begun = max(uid for uid, _, version in ends if version < steps - patience)
    assert set(range(begun)) <= set(trained)
    epochs = Counter(uid // rows for uid in trained)
    assert all(epochs[epoch] == rows for epoch in range(begun // rows))


def test_long_responses_do_not_starve():
    """Prompt 0 is always the slowest of the over-sampled prompts and would be dropped forever if the batch never waited
    for it."""
    world = World(random.Random(1), False, {0: 64}, pass_rate=1.0)
    world.length = lambda sample_id: 400 if split_sample_id(sample_id)[0] == 0 else 8
    scheduler = RolloutScheduler(SchedulerConfig(2, extra_prompts=2, max_attempts=3), world.capacities)
    batches, _, _ = run_steps(scheduler, world, 3, 14)
    step = next(i for i, batch in enumerate(batches) if any(group.uid == 0 for group in batch))
    assert step == 12  # dropped four times as often as max_attempts says, then only this one is awaited


def test_long_responses_are_collected_into_one_batch():
    """Three prompts are always the slowest: dropped three times each, they are then awaited together."""
    world = World(random.Random(1), False, {0: 64}, pass_rate=1.0)
    world.length = lambda sample_id: 400 if split_sample_id(sample_id)[0] < 3 else 8
    scheduler = RolloutScheduler(SchedulerConfig(2, extra_prompts=3, max_attempts=3), world.capacities)
    batches, _, _ = run_steps(scheduler, world, 3, 8)
    assert [i for i, batch in enumerate(batches) if any(group.uid < 3 for group in batch)] == [3]


@pytest.mark.parametrize(("need", "extra_prompts", "max_attempts"), [(2, 4, 1), (8, 16, 1), (4, 16, 3), (8, 32, 3)])
def test_the_longest_of_many_frequently_dropped_prompts_is_trained(need, extra_prompts, max_attempts):
    """More prompts than a batch are awaited, and the longest of them always ends last."""
    world = World(random.Random(1), False, {0: 256}, pass_rate=1.0)
    world.length = lambda sample_id: 400 if split_sample_id(sample_id)[0] == 0 else 8 * (1 + sample_id % 5)
    config = SchedulerConfig(2, extra_prompts=extra_prompts, max_attempts=max_attempts)
    batches, _, _ = run_steps(RolloutScheduler(config, world.capacities), world, need, 12)
    assert any(group.uid == 0 for batch in batches for group in batch)


# -- one rule each


def finish(*ids, replica=0):
    return Decoded(replica, tuple((i, 5, STOP) for i in ids))


def score(*ids, reward=1.0):
    return [Rewarded(i, reward, reward) for i in ids]


def started(config, uids, replicas, need):
    scheduler = RolloutScheduler(config, replicas)
    scheduler.begin_step(0, need)
    scheduler.add_prompts(range(uids))
    return scheduler, scheduler.plan()


def ids_of(uid, size, attempt=0):
    return tuple(make_sample_id(uid, attempt, m) for m in range(size))


def test_group_members_go_together_to_the_replica_with_most_room():
    _, commands = started(SchedulerConfig(2), 3, {7: 4, 9: 4}, 3)
    assert commands == [Generate(7, ids_of(0, 2) + ids_of(2, 2)), Generate(9, ids_of(1, 2))]


def test_separate_group_members_are_balanced_sample_by_sample():
    _, commands = started(SchedulerConfig(2, group_affinity=False), 2, {7: 4, 9: 4}, 2)
    a, b, c, d = ids_of(0, 2) + ids_of(1, 2)
    assert commands == [Generate(7, (a, c)), Generate(9, (b, d))]


def test_a_group_larger_than_any_replica_is_split_and_the_rest_waits():
    scheduler, commands = started(SchedulerConfig(5), 1, {0: 2, 1: 2}, 1)
    a, b, c, d, e = ids_of(0, 5)
    assert commands == [Generate(0, (a, b)), Generate(1, (c, d))]
    assert scheduler.plan([finish(b)]) == [Generate(0, (e,))]


def test_filtered_groups_are_replaced_within_the_budget():
    scheduler, _ = started(SchedulerConfig(1, extra_prompts=1, filter_mean_low=0.5), 0, {0: 8}, 2)
    assert scheduler.num_wanted() == scheduler.budget == 3
    scheduler.add_prompts([0, 1, 2])
    scheduler.plan()
    assert scheduler.num_wanted() == 0
    (a,), (b,) = ids_of(0, 1), ids_of(1, 1)
    commands = scheduler.plan([finish(a, b), *score(a, reward=0.0), *score(b)])
    assert commands == [Drop(0, (a,))] and scheduler.num_wanted() == 1  # b counts until it is taken
    end = scheduler.ended_prompts()[0]
    assert (end.uid, end.outcome, end.reason) == (0, PromptOutcome.FILTERED, "mean_low")


@pytest.mark.parametrize(
    ("rewards", "scores", "reason"),
    [
        ((0, 0, 0, 1), (0, 0, 0, 1), ""),
        ((0, 0, 0, 0), (0, 0, 0, 0), "mean_low"),
        ((1, 0, 0, 0), (0, 0, 0, 0.4), "mean_low"),  # mean .1 is not above .1
        ((1, 0, 1, 1), (1, 1, 1, 0.6), "mean_high"),  # mean .9 is not below .9
        ((2, 2, 2, 2), (0, 1, 0, 1), "std"),
    ],
)
def test_filters_drop_groups_by_mean_and_deviation(rewards, scores, reason):
    config = SchedulerConfig(4, filter_mean_low=0.1, filter_mean_high=0.9, filter_std=True)
    scheduler, _ = started(config, 1, {0: 8}, 1)
    ids = ids_of(0, 4)
    scheduler.plan([finish(*ids), *(Rewarded(i, r, s) for i, r, s in zip(ids, rewards, scores, strict=True))])
    assert scheduler.ready() == (reason == "")
    if reason:
        assert scheduler.ended_prompts()[0].reason == reason
        assert scheduler.metrics()[f"scheduler/filtered_{reason}"] == (1.0, 1.0, 1.0, 1.0)


def test_over_sampled_groups_are_dropped_and_come_first_in_the_next_step():
    scheduler, _ = started(SchedulerConfig(2, extra_prompts=1), 2, {0: 8}, 1)
    first, second = ids_of(0, 2), ids_of(1, 2)
    commands = scheduler.plan([finish(*second, first[0]), *score(*second)])
    assert commands == [Drop(0, first)] and scheduler.ready()
    assert [group.uid for group in scheduler.take_batch()] == [1]
    assert scheduler.plan([Rewarded(first[0], 1.0, 1.0), Aborted(((first[1], 3),))]) == []
    metrics = scheduler.metrics()
    assert metrics["scheduler/aborted"][0] == 2 and metrics["scheduler/aborted_length"] == (8.0, 2.0, 3.0, 5.0)
    assert metrics["scheduler/late_events"][0] == 1 and metrics["scheduler/kept_length"] == (10.0, 2.0, 5.0, 5.0)
    scheduler.begin_step(1, 1)
    assert scheduler.num_wanted() == 1
    assert scheduler.plan() == [Generate(0, ids_of(0, 2, attempt=1))]
    again = ids_of(0, 2, attempt=1)
    scheduler.plan([Decoded(0, tuple((i, 9, STOP) for i in again)), *score(*again)])
    scheduler.take_batch()
    assert scheduler.metrics()["scheduler/kept_length_retried"] == (18.0, 2.0, 9.0, 9.0)


def test_split_groups_and_waiting_samples_are_reported_as_metrics():
    scheduler, _ = started(SchedulerConfig(4, group_affinity=False), 2, {0: 2, 1: 4}, 2)
    first, second = ids_of(0, 4), ids_of(1, 4)
    assert scheduler.metrics()["scheduler/waiting/*"] == (2.0, 1.0, 2.0, 2.0)
    places = {i: name for name in (0, 1) for i in scheduler._samples.replicas[name].samples}
    for i in (*first, *second):
        places |= {i: name for name in (0, 1) for i in scheduler._samples.replicas[name].samples}
        scheduler.plan([finish(i, replica=places[i]), *score(i)])
    groups = scheduler.take_batch()
    metrics = scheduler.metrics()
    homes = [sample.replica for group in groups for sample in group.samples]
    shares = [5 * homes.count(name) for name in (0, 1)]
    assert metrics["scheduler/replica_tokens/*"] == (40.0, 2.0, min(shares), max(shares)) and min(shares) > 0
    assert metrics["scheduler/replicas_per_group"][:2] == (4.0, 2.0)


def test_deterministic_mode_accepts_groups_in_prompt_order():
    scheduler, commands = started(SchedulerConfig(1, extra_prompts=1, deterministic=True), 2, {0: 1, 1: 1}, 1)
    (a,), (b,) = ids_of(0, 1), ids_of(1, 1)
    assert commands == [Generate(0, (a,)), Generate(1, (b,))]
    scheduler.plan([finish(b, replica=1), *score(b)])
    assert not scheduler.ready()  # prompt 0 must be decided first
    assert scheduler.plan([finish(a), *score(a)]) == [Drop(1, (b,))]
    assert [group.uid for group in scheduler.take_batch()] == [0]


def test_an_episode_frees_its_slot_between_turns_and_returns_to_the_same_replica():
    scheduler, commands = started(SchedulerConfig(1), 3, {0: 1, 1: 1}, 3)
    (a,), (b,), (c,) = ids_of(0, 1), ids_of(1, 1), ids_of(2, 1)
    assert commands == [Generate(0, (a,)), Generate(1, (b,))]
    assert scheduler.plan([Decoded(0, turns=((a, 4),))]) == [Generate(0, (c,))]
    assert scheduler.plan([Answered((a,))]) == []  # its slot is taken by c
    assert scheduler.plan([finish(c)]) == [Continue(0, (a,))]
    scheduler.plan([Decoded(0, turns=((a, 9),)), Rewarded(a, 1.0, 1.0), finish(b, replica=1), *score(b, c)])
    assert [group.samples[0].num_tokens for group in scheduler.take_batch()] == [9, 5, 5]


def test_a_lost_replica_restarts_even_its_accepted_groups():
    scheduler, _ = started(SchedulerConfig(1), 2, {0: 1, 1: 1}, 2)
    (a,), (b,) = ids_of(0, 1), ids_of(1, 1)
    scheduler.plan([finish(a), *score(a)])
    assert len(scheduler.finished()) == 1
    assert scheduler.plan([ReplicaLost(0), finish(a)]) == []  # b holds the only slot
    assert scheduler.finished() == []
    commands = scheduler.plan([finish(b, replica=1)])
    assert commands == [Generate(1, ids_of(0, 1, attempt=1))]
    with pytest.raises(RolloutExhausted, match="0 generator replicas are left"):
        scheduler.plan([ReplicaLost(1)])


def test_a_batch_whose_transfer_failed_is_taken_back():
    scheduler, _ = started(SchedulerConfig(1, max_attempts=2), 3, {0: 2, 1: 2}, 3)
    (a,), (b,), (c,) = (ids_of(uid, 1) for uid in range(3))
    scheduler.plan([finish(a, c), finish(b, replica=1), *score(a, b, c)])
    assert [group.uid for group in scheduler.take_batch()] == [0, 1, 2]
    scheduler.handle_events([ReplicaLost(1)])
    scheduler.return_batch()
    assert not scheduler.ready() and scheduler.ended_prompts() == []
    assert scheduler.plan() == [Generate(0, ids_of(1, 1, attempt=1))]
    (again,) = ids_of(1, 1, attempt=1)
    scheduler.plan([finish(again), *score(again)])
    assert [(group.uid, group.attempt) for group in scheduler.take_batch()] == [(0, 0), (1, 1), (2, 0)]
    assert [end.uid for end in scheduler.ended_prompts()] == [0, 1, 2]


def test_in_deterministic_mode_turns_do_not_wait_for_a_failed_sample():
    scheduler, commands = started(SchedulerConfig(1, deterministic=True), 2, {0: 8}, 2)
    ((a, b),) = (command.sample_ids for command in commands)
    scheduler.plan([Decoded(0, (), ((a, 3), (b, 3)))])
    assert scheduler.plan([Answered((a,)), SamplesFailed((b,), "an env rank was lost")]) == [
        Drop(0, (b,)),
        Continue(0, (a,)),
    ]


def test_restarted_prompts_do_not_count_against_the_limit():
    config = SchedulerConfig(1, max_generated_groups=4, max_attempts=1, group_affinity=False)
    scheduler, _ = started(config, 4, {0: 8, 1: 8}, 4)
    (command,) = scheduler.plan([ReplicaLost(1)])
    assert command.replica == 0 and len(command.sample_ids) == 2
    assert scheduler.ended_prompts() == [], "one lost replica is no fault of the prompt's"
    scheduler.plan([SamplesFailed(command.sample_ids, ENV_LOST)])
    assert scheduler.ended_prompts() == [], "nor is a lost environment"
    with pytest.raises(RolloutExhausted, match="failed 1, the last by crash"):
        scheduler.plan([SamplesFailed(ids_of(0, 1), "crash")])
    assert [(end.uid, end.outcome) for end in scheduler.ended_prompts()] == [(0, PromptOutcome.FAILED)]


def test_a_prompt_fails_after_max_attempts_with_its_cause():
    scheduler, _ = started(SchedulerConfig(1, max_attempts=2), 2, {0: 4}, 1)
    for attempt in range(2):
        (a,) = ids_of(0, 1, attempt)
        scheduler.plan([SamplesFailed((a,), "environment crashed")])
    assert [(e.uid, e.attempt, e.outcome, e.reason) for e in scheduler.ended_prompts()] == [
        (0, 1, PromptOutcome.FAILED, "environment crashed")
    ]


def test_a_reward_error_costs_one_sample_and_a_group_of_errors_restarts():
    scheduler, _ = started(SchedulerConfig(2), 2, {0: 4}, 2)
    a, b, c, d = ids_of(0, 2) + ids_of(1, 2)
    errors = [
        Rewarded(a, float("nan"), 0.0),
        Rewarded(b, 1.0, 1.0),
        *(Rewarded(i, 0.0, 0.0, "timeout") for i in (c, d)),
    ]
    commands = scheduler.plan([finish(a, b, c, d), *errors])
    assert commands == [Drop(0, (c, d)), Generate(0, ids_of(1, 2, attempt=1))]
    (group,) = scheduler.finished()
    assert group.samples[0].reward == 0.0 and "not both finite" in group.samples[0].error
    assert scheduler.metrics()["scheduler/score_errors"][0] == 3


def test_a_group_of_errors_counts_if_errors_are_accepted():
    """Validation prompts: each is generated once, and scores 0 if it cannot be scored."""
    scheduler, _ = started(SchedulerConfig(1, accept_errors=True), 2, {0: 4}, 2)
    (a,), (b,) = ids_of(0, 1), ids_of(1, 1)
    scheduler.plan([finish(a, b), Rewarded(a, 0.0, 0.0, "timeout"), *score(b)])
    assert [group.samples[0].score for group in scheduler.take_batch()] == [0.0, 1.0]
    assert scheduler.metrics()["scheduler/score_errors"][0] == 1


def test_an_episode_with_a_failed_environment_restarts_as_often_as_configured():
    scheduler, _ = started(SchedulerConfig(2, max_attempts=2, restart_failed_episodes=True), 1, {0: 4}, 1)
    a, b = ids_of(0, 2)
    lost = Rewarded(a, 0.0, 0.0, "timeout", failed=True)
    commands = scheduler.plan([finish(b), *score(b), Decoded(0, (), ((a, 3),)), lost])
    again = make_sample_id(0, 1, 0)
    assert commands == [Drop(0, (a,)), Generate(0, (again,))] and not scheduler.finished(), "the sibling waits"
    last = make_sample_id(0, 2, 0)
    commands = scheduler.plan([Decoded(0, (), ((again, 3),)), Rewarded(again, 0.0, 0.0, "crash", failed=True)])
    assert commands == [Drop(0, (again,)), Generate(0, (last,))]
    scheduler.plan([Decoded(0, (), ((last, 3),)), Rewarded(last, 0.0, 0.0, "crash", failed=True)])
    (group,) = scheduler.take_batch()
    assert [(s.id, s.reward, s.error) for s in group.samples] == [(last, 0.0, "crash"), (b, 1.0, "")]
    metrics = scheduler.metrics()
    assert metrics["scheduler/score_errors"][0] == 3 and metrics["scheduler/restarted"][0] == 2


def test_a_reward_error_restarts_no_response():
    """Its group may have been scored with it."""
    scheduler, _ = started(SchedulerConfig(2, restart_failed_episodes=True), 1, {0: 4}, 1)
    a, b = ids_of(0, 2)
    assert scheduler.plan([finish(a, b), Rewarded(a, 0.0, 0.0, "timeout"), *score(b)]) == []
    assert [sample.error for sample in scheduler.take_batch()[0].samples] == ["timeout", ""]


def test_scores_of_samples_of_another_scheduler_are_stale():
    """A validation sample is scored twice, the second time in training: its uid is above all offered ones."""
    scheduler, _ = started(SchedulerConfig(1), 1, {0: 4}, 1)
    assert scheduler.plan(score(make_sample_id(1 << 38, 0, 0))) == []
    assert scheduler.metrics()["scheduler/late_events"][0] == 1


def test_outcomes_include_the_rewards_of_filtered_groups():
    scheduler, _ = started(SchedulerConfig(2, extra_prompts=2, filter_std=True, max_attempts=1), 3, {0: 6}, 1)
    a, b, c, d, e, _ = [i for uid in range(3) for i in ids_of(uid, 2)]
    scheduler.plan(
        [finish(a, b, c, d), *score(a, b, reward=0.5), *score(c), *score(d, reward=0.0), SamplesFailed((e,), "x")]
    )
    scheduler.take_batch()
    assert [(end.uid, end.rewards) for end in scheduler.ended_prompts()] == [(0, (0.5, 0.5)), (2, ()), (1, (1.0, 0.0))]


def test_samples_of_a_lost_scorer_are_scored_again_once():
    scheduler, _ = started(SchedulerConfig(2), 1, {0: 4}, 1)
    a, b = ids_of(0, 2)
    scheduler.plan([finish(a, b), *score(a)])
    assert scheduler.plan([ScorerLost((a, b))]) == [SendToScorer(0, (b,))]
    scheduler.plan([*score(b), *score(b, reward=0.0)])  # the lost one's answer arrives as well
    assert [sample.reward for sample in scheduler.take_batch()[0].samples] == [1.0, 1.0]


def test_a_step_that_can_get_no_batch_gives_the_reason():
    scheduler, _ = started(SchedulerConfig(1, filter_mean_low=0.0, max_generated_groups=3), 3, {0: 8}, 2)
    ids = [ids_of(uid, 1)[0] for uid in range(3)]
    scheduler.plan([finish(*ids), *score(ids[0], reward=0.0)])
    with pytest.raises(RolloutExhausted, match=r"3 groups were started and 1 of 2 .*filtered_mean_low 2.*\(3\)"):
        scheduler.plan(score(ids[1], reward=0.0))


def test_the_counts_of_a_starved_step_cover_only_this_step():
    """Groups in progress when the step begins count, earlier outcomes do not."""
    config = SchedulerConfig(1, filter_mean_low=0.0, max_generated_groups=4, max_staleness=1)
    scheduler, _ = started(config, 2, {0: 8}, 1)
    scheduler.plan([finish(*ids_of(0, 1)), *score(*ids_of(0, 1))])
    scheduler.take_batch()
    scheduler.metrics()

    def reject(uid):
        scheduler.add_prompts([uid + 1])
        scheduler.plan([finish(*ids_of(uid, 1)), *score(*ids_of(uid, 1), reward=0.0)])

    reject(1)  # of the step before, rejected after it
    reject(2)
    scheduler.begin_step(1, 1)
    with pytest.raises(RolloutExhausted, match=r"4 groups were started and 0 of 1 .*filtered_mean_low 4"):
        for uid in range(3, 7):
            reject(uid)


def test_samples_started_after_new_weights_have_their_version():
    """Between their arrival and the step that trains on them: validation prompts, a checkpoint."""
    scheduler, _ = started(SchedulerConfig(1, max_staleness=1), 1, {0: 8}, 1)
    scheduler.plan([finish(*ids_of(0, 1)), *score(*ids_of(0, 1))])
    scheduler.take_batch()
    scheduler.metrics()
    scheduler.weights_arrived(1)
    scheduler.add_prompts([1])
    assert scheduler.plan() == [Generate(0, ids_of(1, 1))]
    scheduler.begin_step(1, 1)
    scheduler.plan([finish(*ids_of(1, 1)), *score(*ids_of(1, 1))])
    assert [group.version for group in scheduler.take_batch()] == [1]
    assert scheduler.metrics()["scheduler/staleness/*"] == (0.0, 1.0, 0.0, 0.0)


def test_arriving_weights_restart_running_samples_but_no_later_ones():
    scheduler, _ = started(SchedulerConfig(1, max_staleness=1, on_new_weights="restart"), 2, {0: 8}, 1)
    scheduler.plan([finish(*ids_of(0, 1)), *score(*ids_of(0, 1))])
    scheduler.take_batch()
    scheduler.weights_arrived(1)
    again = ids_of(1, 1, attempt=1)
    assert scheduler.plan() == [Drop(0, ids_of(1, 1)), Generate(0, again)]
    scheduler.begin_step(1, 1)
    assert not any(isinstance(command, Drop) for command in scheduler.plan())
    scheduler.plan([finish(*again), *score(*again)])
    assert [(group.uid, group.version) for group in scheduler.take_batch()] == [(1, 1)]


def test_invalid_calls_are_refused():
    with pytest.raises(ValueError, match="room"):
        RolloutScheduler(SchedulerConfig(1), {})
    scheduler, _ = started(SchedulerConfig(1), 1, {0: 1}, 1)
    with pytest.raises(ValueError, match="must rise"):
        scheduler.add_prompts([0])
    with pytest.raises(ValueError, match="take"):
        scheduler.take_batch()


def test_the_state_survives_json_and_restarts_running_samples():
    config = SchedulerConfig(2, max_staleness=1)
    scheduler, _ = started(config, 3, {0: 8, 1: 8}, 2)
    done = ids_of(1, 2)
    scheduler.plan([finish(*done, replica=1), *score(*done)])
    state = json.loads(json.dumps(scheduler.state_dict()))
    assert state["queue"] == [[0, 1, 0], [2, 1, 0]]
    restored = RolloutScheduler(config, {0: 8, 1: 8})
    restored.load_state_dict(state)
    assert restored.finished() == scheduler.finished()
    restored.begin_step(1, 2)
    assert restored.plan() == [Generate(0, ids_of(0, 2, 1)), Generate(1, ids_of(2, 2, 1))]
    again = ids_of(0, 2, 1)
    restored.plan([finish(*again), *score(*again)])
    assert [(group.uid, group.version) for group in restored.take_batch()] == [(0, 1), (1, 0)]
    smaller = RolloutScheduler(config, {4: 8})
    smaller.load_state_dict(state)
    assert {sample.replica for sample in smaller.finished()[0].samples} == {4}


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_a_batch_waits_for_groups_that_later_batches_could_not_take_in_time(max_staleness):
    """One group per step; two groups of the first weights keep generating, while all others end at once. The last two
    batches that may take them must do so: the one before the last waits, although it could take another group."""
    config = SchedulerConfig(1, max_staleness=max_staleness, max_generated_groups=1000)
    scheduler = RolloutScheduler(config, {0: 64})
    long, uid = {make_sample_id(0, 0, 0), make_sample_id(1, 0, 0)}, 0
    for version in range(max_staleness + 1):
        scheduler.begin_step(version, 1)
        for _ in range(3):
            fresh = range(uid, uid := uid + scheduler.num_wanted())
            scheduler.add_prompts(fresh)
            admitted = [i for command in scheduler.plan() for i in command.sample_ids if isinstance(command, Generate)]
            scheduler.handle_events([finish(*(ended := set(admitted) - long)), *score(*ended)])
        if version < max_staleness - 1:
            assert scheduler.ready() and {group.uid for group in scheduler.take_batch()}.isdisjoint({0, 1})
            continue
        assert not scheduler.ready()
        one = long.pop()
        scheduler.handle_events([finish(one), *score(one)])
        assert scheduler.ready() and [group.uid for group in scheduler.take_batch()] == [split_sample_id(one)[0]]
    assert scheduler.metrics()["scheduler/cancelled"][0] == 0


def test_paused_replicas_get_no_samples_until_they_resume():
    scheduler, commands = started(SchedulerConfig(1, max_staleness=1), 4, {0: 8, 1: 8}, 4)
    assert {command.replica for command in commands} == {0, 1}
    scheduler.pause(frozenset({0}))
    scheduler.add_prompts(range(4, 8))
    assert scheduler.plan() == [Generate(1, ids_of(4, 1) + ids_of(5, 1) + ids_of(6, 1) + ids_of(7, 1))]
    running = [split_sample_id(i)[0] for command in commands if command.replica == 0 for i in command.sample_ids]
    turn = make_sample_id(running[0], 0, 0)
    assert scheduler.plan([Decoded(0, turns=((turn, 5),)), Answered((turn,))]) == []
    scheduler.pause(frozenset())
    assert scheduler.plan() == [Continue(0, (turn,))]


def test_generation_continues_between_steps_only_with_staleness():
    for max_staleness, wanted in ((0, 0), (1, 1)):
        scheduler, _ = started(SchedulerConfig(1, max_staleness=max_staleness), 1, {0: 8}, 1)
        (a,) = ids_of(0, 1)
        scheduler.plan([finish(a), *score(a)])
        scheduler.take_batch()
        assert scheduler.num_wanted() == wanted


def test_scheduler_config_is_read_from_the_run_configuration():
    config = Config.model_validate(
        {"rollout": {"group_size": 4, "extra_prompts": 2, "max_staleness": 1}, "deterministic": True}
    )
    read = SchedulerConfig.of(config)
    assert (read.group_size, read.extra_prompts, read.max_staleness, read.deterministic) == (4, 2, 1, True)
