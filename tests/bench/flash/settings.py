"""Everything that shapes a simulated result, in one place; each line of the bench prints what it used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpcrl.rollout.scheduling.policies import SchedulerConfig

# Seconds of a decode iteration with n live requests are A_S + n * b. Only b / A_S shapes the ratios of settings without
# environments, so A_S is what a model of some billion parameters takes and b / A_S one of:
#   native: the native engine on one CPU core, by `python -m tests.bench.flash.calibrate` (.98 ms + n * .088 ms)
#   flat: assumed for a GPU, where decoding waits for memory and more requests cost little
A_S = 0.020
B_OVER_A = {"native": 0.090, "flat": 0.010}


@dataclass(frozen=True)
class Lengths:
    """Tokens of one turn: `law` is lognormal (shape: sigma of the logarithm), pareto (shape: its exponent) or constant;
    cut at `cap`. `prompt_share`: the part of the logarithm's variance that siblings share, as hard prompts are long."""

    law: str = "lognormal"
    median: float = 1500.0
    shape: float = 1.0
    cap: int = 32768
    prompt_share: float = 0.5


@dataclass(frozen=True)
class Latency:
    """Seconds of one environment step or reward: N(mean, std) truncated at 0. A share of the environments is
    `slow_factor` times slower in all its steps; another stops answering at one of its steps and is given up after
    `timeout_s`."""

    mean_s: float
    std_s: float = 0.0
    slow_share: float = 0.0
    slow_factor: float = 10.0
    hung_share: float = 0.0
    timeout_s: float = 600.0


@dataclass(frozen=True)
class World:
    """What generates: `replicas` engines of `slots` slots each, and what their samples are like.

    turns: answers of a sample; with an environment, which acts after each, and without one always 1. pass_rate: share
    of groups whose rewards are not all equal. requests_per_slot: requests the scheduler gives a replica for each of its
    slots (production: 2). decode_chunk_tokens: iterations after which ends are reported. slowness: (replica, factor) of
    slow replicas; told_pace: the scheduler hears of it.
    """

    replicas: int
    slots: int
    lengths: Lengths
    pass_rate: float = 1.0
    turns: int = 1
    environment: Latency | None = None
    reward: Latency = Latency(1.0, 0.5)
    decode_a_s: float = A_S
    decode_b_s: float = A_S * B_OVER_A["native"]
    decode_chunk_tokens: int = 16
    requests_per_slot: int = 2
    slowness: tuple[tuple[int, float], ...] = ()
    told_pace: bool = False

    def iteration_s(self, live: int) -> float:
        """Seconds of one decode iteration with `live` requests on a replica that is not slow."""
        return self.decode_a_s + self.decode_b_s * live

    @property
    def tokens_per_s(self) -> float:
        """Most tokens per second that all replicas together can generate: every slot live."""
        slowness = dict(self.slowness)
        full = sum(1 / slowness.get(name, 1.0) for name in range(self.replicas))
        return full * self.slots / self.iteration_s(self.slots)

    @property
    def fastest_token_s(self) -> float:
        """Seconds per token of a request that is alone on the fastest replica."""
        slowness = dict(self.slowness)
        return self.iteration_s(1) * min(slowness.get(name, 1.0) for name in range(self.replicas))


@dataclass(frozen=True)
class Training:
    """A run: `steps` batches of `need` groups, each trained for `train_s`; publishing the weights stops the replicas
    for `publish_s`. overlap: generators go on while the trainer works (disaggregated); else they stop (colocated)."""

    need: int
    steps: int
    train_s: float = 0.0
    publish_s: float = 0.0
    overlap: bool = False


def policy(group_size: int, **choices: Any) -> SchedulerConfig:
    """The production scheduler's settings; a step may start as many groups as it needs."""
    return SchedulerConfig(group_size, **{"max_generated_groups": 1_000_000} | choices)
