"""ROLL Flash's settings (arXiv 2510.11345) as surfaces over slots, pass rate, tail and turns.

Each yields points: dicts with the axes' values, seconds of the arms and `speedup`, the figure to compare with the
published one. Batch rollout with the better of its two ways to refill is the baseline, unless a scenario says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hpcrl.rollout.scheduling.policies import SchedulerConfig
from tests.bench.flash.batch import batch_rollout
from tests.bench.flash.bounds import check, steady_efficiency
from tests.bench.flash.settings import A_S, B_OVER_A, Latency, Lengths, Training, World, policy
from tests.bench.flash.simulation import Run, Simulation

Point = dict[str, Any]

# The longest answer is 21.8 times the median in all of them.
TAILS = {
    "lognormal .6": Lengths("lognormal", shape=0.6),
    "lognormal 1": Lengths("lognormal", shape=1.0),
    "lognormal 1.4": Lengths("lognormal", shape=1.4),
    "pareto 1.2": Lengths("pareto", shape=1.2),
}
TURN = Lengths("lognormal", median=96, shape=0.5, cap=512, prompt_share=0.2)  # tokens per environment step: 64 to 128
STRAGGLERS = {
    "none": (0.0, 0.0),
    "1 % slow": (0.01, 0.0),
    "1 % slow, 0.2 % hung": (0.01, 0.002),
    "5 % slow, 1 % hung": (0.05, 0.01),
}
HUNG_AFTER_S = 600.0
ROLLOUT_SHARE = 0.7  # of a step of batch rollout; the rest trains
DEVICES = 32
SKIPPED = 3  # steps until the pipeline is full


@dataclass(frozen=True)
class Scenario:
    """A published setting: its figure, the point that is most like it, what to plot, and its points."""

    published: float
    plausible: dict[str, Any]
    axes: tuple[str, str]  # horizontal, one line per value
    points: Callable[[str], Iterator[Point]]
    about: str


def made(decode: str, *sizes: Any, **others: Any) -> World:
    """A world that decodes like that (settings.B_OVER_A)."""
    return World(*sizes, decode_b_s=A_S * B_OVER_A[decode], **others)


def simulate(world: World, config: SchedulerConfig, training: Training, seed: int = 0) -> Run:
    """A run within its bounds."""
    run = Simulation(world, config, training, seed).run()
    check(run, world, training)
    return run


def baseline(world: World, group_size: int, training: Training, filtered: bool = False) -> Point:
    """Seconds of batch rollout."""
    missing = batch_rollout(world, group_size, training, filtered=filtered)
    if not filtered:
        return {"batch_s": missing.rollout_s}
    whole = batch_rollout(world, group_size, training, filtered=True, whole_waves=True)
    return {"batch_s": min(missing.rollout_s, whole.rollout_s), "batch_refilled_s": missing.rollout_s}


def queue_points(decode: str) -> Iterator[Point]:
    training = Training(need=8, steps=20)
    for slots, pass_rate, tail in product((16, 64, 256), (0.25, 0.5, 0.75, 1.0), TAILS):
        world = made(decode, 8, slots // 8, TAILS[tail], pass_rate=pass_rate)
        point = {"slots": slots, "pass_rate": pass_rate, "tail": tail} | baseline(world, 8, training, filtered=True)
        for name, extra, attempts in (("queue_s", 0, 3), ("ours_s", 16, 3), ("impatient_s", 16, 1000)):
            config = policy(8, filter_std=True, extra_prompts=extra, max_attempts=attempts)
            point[name] = (run := simulate(world, config, training)).rollout_s
        point["impatient_kept_length"] = sum(step.kept_tokens for step in run.steps) / run.kept
        point["mean_length"] = sum(run.lengths) / len(run.lengths)
        for name in ("queue", "impatient"):
            point[name] = point["batch_s"] / point[f"{name}_s"]
        yield point | {"speedup": point["batch_s"] / point["ours_s"]}


def replication_points(decode: str) -> Iterator[Point]:
    training = Training(need=64, steps=4)
    sizes, tails = ((16, 16), (64, 4), (64, 16)), ("lognormal .6", "lognormal 1", "pareto 1.2")
    for (replicas, slots), prompt_share, tail in product(sizes, (0.0, 0.5, 0.8), tails):
        world = made(decode, replicas, slots, replace(TAILS[tail], prompt_share=prompt_share))
        point = {"replicas x slots": f"{replicas} x {slots}", "prompt_share": prompt_share, "tail": tail}
        point |= baseline(world, 16, training)
        for name, together in {"together_s": True, "ours_s": False}.items():
            point[name] = simulate(world, policy(16, group_affinity=together), training).rollout_s
        yield point | {
            "speedup": point["batch_s"] / point["ours_s"],
            "against_together": point["together_s"] / point["ours_s"],
        }


def environment_points(decode: str) -> Iterator[Point]:
    training = Training(need=64, steps=2)
    for slots, turns, stragglers in product((64, 256, 512), (1, 5, 10, 20, 30), ("none", "1 % slow")):
        slow, hung = STRAGGLERS[stragglers]
        latency = Latency(10.0, 10.0, slow, 10.0, hung, HUNG_AFTER_S)
        world = made(decode, 8, slots // 8, TURN, turns=turns, environment=latency)
        point = {"slots": slots, "turns": turns, "stragglers": stragglers} | baseline(world, 8, training)
        point["ours_s"] = simulate(world, policy(8), training).rollout_s
        yield point | {"speedup": point["batch_s"] / point["ours_s"]}


def redundant_points(decode: str) -> Iterator[Point]:
    training = Training(need=32, steps=4)
    for slots, turns, stragglers in product((288,), (1, 5, 10, 20), STRAGGLERS):
        slow, hung = STRAGGLERS[stragglers]
        latency = Latency(10.0, 5.0, slow, 10.0, hung, HUNG_AFTER_S)
        world = made(decode, 8, slots // 8, TURN, turns=turns, environment=latency)
        point = {"slots": slots, "turns": turns, "stragglers": stragglers} | baseline(world, 8, training)
        point["plain_s"] = simulate(world, policy(8), training).rollout_s
        point["groups_s"] = simulate(world, policy(8, extra_prompts=4), training).rollout_s
        point["ours_s"] = simulate(world, policy(8, extra_prompts=4, extra_members=1), training).rollout_s
        yield point | {
            "speedup": point["plain_s"] / point["ours_s"],
            "against_batch": point["batch_s"] / point["ours_s"],
        }


def async_points(
    world: World, need: int, axes: Point, lags: tuple[int, ...], on_stale: tuple[str, ...] = ("wait",)
) -> Iterator[Point]:
    """Sync and async on the same devices: all generate then all train, or some of them generate and the others train.
    Every device generates like a replica; training takes 3/7 of batch rollout's seconds on all of them."""
    colocated, filtered = Training(need, steps=6), world.pass_rate < 1
    point = axes | baseline(world, 8, colocated, filtered)
    train_s = point["batch_s"] * (1 - ROLLOUT_SHARE) / ROLLOUT_SHARE
    sync = simulate(world, policy(8, filter_std=filtered), colocated)
    point |= {"train_s": train_s, "batch_s": point["batch_s"] + train_s, "sync_s": sync.rollout_s + train_s}
    work_s = sync.executed / len(sync.steps) / world.tokens_per_s  # of a batch, on all devices at full capacity
    balanced = world.replicas * work_s / (work_s + train_s)
    for lag, stale in product(lags, on_stale):
        found: list[tuple[float, Point]] = []
        for share in (1.0, 1.5):  # more generators than full slots would need: they are not always full
            generators = min(world.replicas - 1, max(1, round(balanced * share)))
            split = replace(world, replicas=generators)
            training = Training(need, 10, train_s * world.replicas / (world.replicas - generators), overlap=True)
            run = simulate(split, policy(8, max_staleness=lag, on_stale=stale, filter_std=filtered), training)
            seconds = (run.steps[-1].taken - run.steps[SKIPPED - 1].taken) / (len(run.steps) - SKIPPED)
            used = {"generators": generators, "efficiency": steady_efficiency(run, split, training, SKIPPED)}
            found.append((seconds, used | {"cancelled": run.count("cancelled"), "stale_wait_s": run.stale_wait_s}))
        seconds, used = min(found, key=lambda each: each[0])
        ratios = {"speedup": point["batch_s"] / seconds, "against_sync": point["sync_s"] / seconds}
        yield {"lag": lag, "on_stale": stale} | point | used | {"ours_s": seconds} | ratios


def rlvr_points(decode: str) -> Iterator[Point]:
    for slots, pass_rate, tail in product((4, 16), (0.5, 1.0), ("lognormal 1", "pareto 1.2")):
        world = made(decode, DEVICES, slots, TAILS[tail], pass_rate=pass_rate)
        axes = {"slots": slots * DEVICES, "pass_rate": pass_rate, "tail": tail}
        yield from async_points(world, 64, axes, (1, 2, 4), ("wait", "cancel"))


def agentic_points(decode: str) -> Iterator[Point]:
    for turns, stragglers in product((5, 10), ("none", "1 % slow", "1 % slow, 0.2 % hung")):
        slow, hung = STRAGGLERS[stragglers]
        latency = Latency(10.0, 10.0, slow, 10.0, hung, HUNG_AFTER_S)
        lengths = replace(TURN, shape=1.0, cap=96 * 22)
        world = made(decode, DEVICES, 16, lengths, turns=turns, environment=latency)
        axes = {"slots": 16 * DEVICES, "turns": turns, "stragglers": stragglers}
        yield from async_points(world, 32, axes, (1, 2))


SCENARIOS = {
    "queue": Scenario(
        3.4,
        {"slots": 64, "pass_rate": 0.5, "tail": "lognormal 1"},
        ("slots", "tail"),
        queue_points,
        "8 x 8 with filter_std: batch rollout against the queue with 16 extra prompts (impatient: none is waited for)",
    ),
    "replication": Scenario(
        1.84,
        {"replicas x slots": "16 x 16", "prompt_share": 0.5, "tail": "lognormal 1"},
        ("prompt_share", "tail"),
        replication_points,
        "64 prompts x 16: batch rollout, siblings on one replica, against the queue with siblings apart",
    ),
    "environments": Scenario(
        2.46,
        {"slots": 256, "turns": 20, "stragglers": "none"},
        ("turns", "slots"),
        environment_points,
        "512 environments of N(10, 10) s: turns in lockstep against each environment on its own",
    ),
    "redundant": Scenario(
        5.4,
        {"slots": 288, "turns": 10, "stragglers": "1 % slow, 0.2 % hung"},
        ("turns", "stragglers"),
        redundant_points,
        "N(10, 5) s: 32 groups x 8 against 36 x 9, both by our scheduler (against_batch: turns in lockstep)",
    ),
    "rlvr": Scenario(
        2.24,
        {"slots": 512, "pass_rate": 0.5, "tail": "lognormal 1", "lag": 2, "on_stale": "wait"},
        ("lag", "on_stale"),
        rlvr_points,
        "64 x 8 on 32 devices: batch rollout then training against max_staleness on the better of two splits",
    ),
    "agentic": Scenario(
        2.72,
        {"slots": 512, "turns": 10, "stragglers": "1 % slow", "lag": 2},
        ("turns", "stragglers"),
        agentic_points,
        "32 x 8 environments of N(10, 10) s on 32 devices: lockstep, then training against max_staleness",
    ),
}
