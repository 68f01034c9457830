"""Hand-made steps."""

from __future__ import annotations

import random

from hpcrl.timeline.step_file import (
    FORMAT,
    ChunkRow,
    ClockHeader,
    CommandRow,
    RankHeader,
    SampleRow,
    StepHeader,
    StepTimeline,
    TimelineRow,
    WaitRow,
    WorkRow,
)

ROLES = (("controller",), ("trainer",), ("generator",), ("generator",), ("reward",))


def make_step(
    *rows: TimelineRow, length: int = 100, step: int = 7, roles: tuple[tuple[str, ...], ...] = ROLES
) -> StepTimeline:
    """A step of `length` microseconds."""
    ranks = [RankHeader(rank, "node1", list(names)) for rank, names in enumerate(roles)]
    made = StepTimeline(StepHeader(FORMAT, step, 1.7e9, length / 1e6, True, ranks, {"node1": ClockHeader(0.0, 0.0)}))
    for row in rows:
        made.add(row)
    return made


def large_step(num_trainers: int = 128, num_generators: int = 160, step: int = 7) -> StepTimeline:
    """A step of 300 s with hundreds of ranks: one-GPU replicas with long tails, many short commands, 8,192 samples."""
    rng = random.Random(step)
    num_rewards = 11
    roles = [("controller",), *[("trainer",)] * num_trainers, *[("generator",)] * num_generators]
    roles += [("reward",)] * num_rewards
    made = make_step(length=300_000_000, step=step, roles=tuple(roles))
    scorers = range(1 + num_trainers + num_generators, len(roles))
    made.add(WaitRow("rollouts", 0, 180_000_000))
    for rank in range(1 + num_trainers, 1 + num_trainers + num_generators):
        at, end, number = 0, rng.randrange(80_000_000, 175_000_000), 0
        while at < end:
            duration, number = rng.randrange(300_000, 900_000), number + 2
            made.add(CommandRow(rank, "Admit", number - 1, at, 4_000))
            made.add(ChunkRow(rank, number, at + 5_000, duration, 4096, rng.randrange(1, 256), rng.randrange(64)))
            at += duration + 6_000
        made.add(CommandRow(rank, "UpdateWeights", number + 1, 290_000_000, 8_000_000 + rng.randrange(1_000_000)))
    for index in range(8192):
        rank = 1 + num_trainers + index % num_generators
        start, sample = rng.randrange(1_000_000), index << 14
        end = start + rng.randrange(5_000_000, 170_000_000)
        scored = end + rng.randrange(2_000_000)
        made.add(WorkRow("reward", rng.choice(scorers), sample, "maths", end, scored - end))
        made.add(
            SampleRow(sample, index // 8, "maths", rank, "trained", 1, 900, 1, -5, start, end, scored, 181_000_000)
        )
    for rank in range(1, 1 + num_trainers):
        made.add(CommandRow(rank, "TransferRollouts", 1, 180_000_000, 1_500_000 + rng.randrange(100_000)))
        made.add(CommandRow(rank, "Logprobs", 2, 182_000_000, 20_000_000 + rng.randrange(1_000_000)))
        for number in range(16):
            start = 204_000_000 + number * 5_300_000
            made.add(CommandRow(rank, "TrainStep", 3 + number, start, 5_000_000 + rng.randrange(250_000)))
        made.add(CommandRow(rank, "UpdateWeights", 19, 290_000_000, 9_000_000))
    made.waits += [
        WaitRow("TransferRollouts", 180_000_000, 1_700_000),
        WaitRow("Logprobs", 182_000_000, 21_000_000),
        WaitRow("TrainStep", 204_000_000, 85_000_000),
        WaitRow("UpdateWeights", 290_000_000, 9_200_000),
    ]
    return made
