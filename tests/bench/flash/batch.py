"""Batch rollout, the baseline: a wave of prompts at a time, siblings on one replica, and nothing starts before all
that went before has ended: answers, then environments, turn by turn, then rewards, then filters, then training."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcrl.rollout.types import make_sample_id
from tests.bench.flash.engine import Engine, Request
from tests.bench.flash.laws import Outcomes
from tests.bench.flash.settings import Training, World


@dataclass
class BatchRun:
    """Seconds per step from its start to its batch, and with its training; prompts generated per step."""

    rollout_s: float
    step_s: float
    prompts: float
    lengths: list[int]


def batch_rollout(
    world: World, group_size: int, training: Training, *, filtered: bool, whole_waves: bool = False, seed: int = 0
) -> BatchRun:
    """Run `training.steps` steps. filtered: groups whose scores are all equal do not count, and another wave follows,
    of as many prompts as are missing or (`whole_waves`) of a whole batch. A hung environment ends its sample when it
    is given up."""
    outcomes, lengths, seconds, uid = Outcomes(world, seed), [], 0.0, 0
    for _ in range(training.steps):
        missing = training.need
        while missing > 0:
            wave = range(uid, uid + (training.need if whole_waves else missing))
            uid = wave.stop
            groups = [[make_sample_id(prompt, 0, member) for member in range(group_size)] for prompt in wave]
            seconds += _wave_s(world, groups, outcomes, lengths)
            missing -= sum(not filtered or len({outcomes.score(i) for i in group}) > 1 for group in groups)
    rollout_s = seconds / training.steps
    return BatchRun(rollout_s, rollout_s + training.train_s + training.publish_s, uid / training.steps, lengths)


def _wave_s(world: World, groups: list[list[int]], outcomes: Outcomes, lengths: list[int]) -> float:
    """Seconds of one wave. Groups are dealt out to the replicas in turn before anything is known of them."""
    samples = [i for group in groups for i in group]
    tokens = dict.fromkeys(samples, 0)
    hung: set[int] = set()
    seconds = 0.0
    for turn in range(world.turns):
        engines = [Engine(world, name) for name in range(world.replicas)]
        for number, group in enumerate(groups):
            requests = [Request(i, outcomes.tokens(i, turn)) for i in group if i not in hung]
            engines[number % len(engines)].add(requests)
            for request in requests:
                tokens[request.sample_id] += request.tokens
        seconds += max(_drained(engine) for engine in engines)
        if world.environment is not None:
            waits = {i: outcomes.environment_s(i, turn) for i in samples if i not in hung}
            hung |= {i for i, wait in waits.items() if wait == math.inf}
            seconds += max((min(wait, world.environment.timeout_s) for wait in waits.values()), default=0.0)
    lengths += tokens.values()
    return seconds + max(outcomes.reward_s(i) for i in samples)


def _drained(engine: Engine) -> float:
    """When the engine has ended all it has."""
    while engine.num_requests:
        engine.advance(engine.next_time())
        engine.reported()
    return engine.time
