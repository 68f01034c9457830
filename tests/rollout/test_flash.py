"""The simulator of ROLL Flash's settings: exact accounting, its bounds, and the scheduler's effect."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hpcrl.rollout.scheduling.events import Drop
from hpcrl.rollout.scheduling.scheduler import RolloutScheduler
from hpcrl.rollout.types import make_sample_id
from tests.bench.flash.batch import batch_rollout
from tests.bench.flash.bounds import check, proposition_1_s, proposition_2_s, steady_efficiency, training_share
from tests.bench.flash.engine import Engine, Request
from tests.bench.flash.laws import Outcomes
from tests.bench.flash.settings import Latency, Lengths, Training, World, policy
from tests.bench.flash.simulation import Simulation

LONG = Lengths(median=200, cap=4400)
AGENTS = {"turns": 4, "environment": Latency(5.0, 5.0, slow_share=0.05, hung_share=0.02, timeout_s=90.0)}


class OneReplica(RolloutScheduler):
    """Broken: leaves all replicas but the first idle."""

    def __init__(self, config, replicas):
        super().__init__(config, dict.fromkeys([0], replicas[0]))


def test_a_simulated_engine_divides_its_time_among_its_slots():
    world = World(1, 2, LONG, decode_a_s=1.0, decode_b_s=0.5, decode_chunk_tokens=1)
    engine = Engine(world, 0)
    engine.add([Request(1, 10), Request(2, 4), Request(3, 3)])
    ends = {}
    while engine.num_requests:
        engine.advance(engine.next_time())
        ends |= dict.fromkeys(engine.reported(), engine.time)
    assert ends == {2: 8.0, 3: 14.0, 1: 14.0 + 3 * 1.5}  # two live: 2 s an iteration; one: 1.5 s
    assert engine.executed == 17


def test_ends_are_reported_after_their_decode_chunk_and_drops_free_slots():
    engine = Engine(World(1, 1, LONG, decode_a_s=1.0, decode_b_s=0.0, decode_chunk_tokens=8), 0)
    engine.add([Request(1, 3), Request(2, 100), Request(3, 1)])
    engine.advance(engine.next_time())
    assert engine.time == 3.0 and engine.reported() == []
    engine.advance(engine.next_time())
    assert engine.time == 8.0 and engine.reported() == [1]
    assert engine.drop((2,)) == ((2, 5),)
    engine.advance(engine.next_time())
    assert engine.time == 9.0 and engine.reported() == [3]


def test_outcomes_follow_their_distributions():
    world = World(1, 1, LONG, pass_rate=0.3, environment=Latency(10.0, 10.0, slow_share=0.01), turns=2)
    outcomes = Outcomes(world, seed=0)
    samples = [make_sample_id(uid, 0, member) for uid in range(500) for member in range(4)]
    lengths = sorted(outcomes.tokens(i, 0) for i in samples)
    assert 170 < lengths[1000] < 230 and lengths[-1] > 20 * 200
    latencies = [outcomes.environment_s(i, 0) for i in samples]
    assert min(latencies) >= 0 and 12 < sum(latencies) / 2000 < 16  # 12.9 is the truncated normal's mean
    mixed = [len({outcomes.score(make_sample_id(uid, 0, m)) for m in range(16)}) > 1 for uid in range(500)]
    assert 120 < sum(mixed) < 180


@pytest.mark.parametrize("lag", [0, 0.5, 1, 2])
@pytest.mark.parametrize("agents", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_no_sample_is_lost_and_no_bound_is_violated(lag, agents, overlap):
    world = replace(World(3, 4, LONG, pass_rate=0.7), **(AGENTS if agents else {}))
    training = Training(need=6, steps=6, train_s=20.0, publish_s=1.0, overlap=overlap and lag > 0)
    config = policy(4, filter_std=True, extra_prompts=2, extra_members=1, max_staleness=lag)
    run = Simulation(world, config, training, seed=1).run()
    assert run.kept == 6 * 6 * 4 and run.dropped > 0
    assert run.admitted == run.kept + run.dropped + run.held
    assert 0 < check(run, world, training) <= 1
    assert max(step.lag for step in run.steps) <= math.ceil(lag)


def test_equal_seeds_give_equal_runs_and_different_seeds_do_not():
    world, training = World(2, 4, LONG), Training(need=4, steps=3)
    runs = [Simulation(world, policy(4), training, seed).run() for seed in (5, 5, 6)]
    assert runs[0] == runs[1] and runs[0].time != runs[2].time


def test_queued_scheduling_is_faster_than_batches_if_groups_are_filtered():
    world, training = World(4, 4, LONG, pass_rate=0.5), Training(need=8, steps=8)
    run = Simulation(world, policy(4, filter_std=True, extra_prompts=8), training).run()
    batch = batch_rollout(world, 4, training, filtered=True)
    assert run.rollout_s < batch.rollout_s / 1.3
    # Where nothing is filtered and a slot waits for every sample, there is nothing to gain.
    world = World(8, 4, LONG)
    alike = (
        Simulation(world, policy(4), training).run().rollout_s
        / batch_rollout(world, 4, training, filtered=False).rollout_s
    )
    assert 0.9 < alike < 1.1


def test_the_first_proposition_bounds_synchronous_steps():
    world = World(4, 4, LONG, decode_b_s=0.0, decode_chunk_tokens=1, reward=Latency(0.0))
    run = Simulation(world, policy(4), Training(need=32, steps=6)).run()
    seconds = [tokens * world.decode_a_s for tokens in run.lengths]
    mean_s = sum(seconds) / len(seconds)
    assert run.rollout_s <= proposition_1_s(16, 128, mean_s, max(seconds), lag=0)
    assert run.rollout_s > 128 * mean_s / 16  # otherwise the first part of the bound would suffice


def test_the_second_proposition_is_the_first_with_the_best_trainer_share():
    share = training_share(64, 512, 20.0, 300.0, 1, train_s=8.0)
    both = proposition_2_s(64, 512, 20.0, 300.0, 1, train_s=8.0)
    assert 512 * 8.0 / (64 * share) == pytest.approx(both)
    assert proposition_1_s(64 * (1 - share), 512, 20.0, 300.0, 1) <= both


def test_saturated_generators_are_never_idle():
    world, training = World(4, 2, LONG), Training(need=48, steps=8, train_s=1.0, overlap=True)
    run = Simulation(world, policy(4, max_staleness=1), training).run()
    assert 48 * 4 * sum(run.lengths) / len(run.lengths) / max(run.lengths) >= 8
    assert steady_efficiency(run, world, training, skipped=3) >= 0.95


class Leaky(RolloutScheduler):
    """Broken: does not abort dropped samples."""

    def plan(self, events=()):
        return [command for command in super().plan(events) if not isinstance(command, Drop)]


def test_the_simulation_detects_a_broken_scheduler():
    world, training = World(4, 2, LONG), Training(need=48, steps=5, train_s=1.0, overlap=True)
    config = policy(4, max_staleness=1)
    right = Simulation(world, config, training).run()
    idle = Simulation(world, config, training, scheduler=OneReplica).run()
    assert idle.time > 2 * right.time
    assert steady_efficiency(idle, world, training, skipped=2) < 0.5
    with pytest.raises(AssertionError):  # replicas are given more than they hold
        Simulation(World(2, 2, LONG), policy(4, extra_prompts=8), Training(need=2, steps=20), scheduler=Leaky).run()
