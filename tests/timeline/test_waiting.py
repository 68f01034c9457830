"""What ranks wait for, by numbers worked out by hand."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from hpcrl.timeline.step_file import ChunkRow, CommandRow, TimelineRow, WaitRow, WorkRow
from hpcrl.timeline.waiting import RankActivity, role_shares
from tests.timeline.steps import make_step

ROWS: tuple[TimelineRow, ...] = (
    WaitRow("rollouts", 0, 50),
    WaitRow("TransferRollouts", 50, 10),
    WaitRow("TrainStep", 60, 20),
    WaitRow("UpdateWeights", 80, 10),
    ChunkRow(2, 1, 0, 20, 64, 8, 2),
    ChunkRow(2, 2, 20, 20, 64, 8, 0),
    ChunkRow(3, 1, 0, 10, 64, 8, 0),
    WorkRow("reward", 4, 1, "maths", 38, 5),
    WorkRow("reward", 4, 2, "maths", 40, 5),
    CommandRow(1, "TransferRollouts", 1, 50, 8),
    CommandRow(1, "TrainStep", 2, 60, 20),
    CommandRow(1, "UpdateWeights", 3, 80, 10),
    CommandRow(2, "TransferRollouts", 3, 50, 10),
    CommandRow(2, "UpdateWeights", 4, 80, 10),
    CommandRow(3, "UpdateWeights", 2, 80, 8),
)


def test_every_gap_has_the_cause_that_the_pipeline_waited_for() -> None:
    activity = RankActivity(make_step(*ROWS))
    assert activity.waiting(1) == [
        (0, 40, "generation"),
        (40, 45, "rewards"),
        (45, 50, "scheduling"),
        (58, 60, "slower ranks in rollout transfer"),
        (90, 100, "the controller"),
    ]
    assert activity.waiting(3) == [
        (10, 40, "slower replicas"),
        (40, 45, "rewards"),
        (45, 50, "scheduling"),
        (50, 60, "rollout transfer"),
        (60, 80, "training"),
        (88, 90, "slower ranks in weight updates"),
        (90, 100, "the controller"),
    ]
    assert activity.busy[2] == [
        (0, 20, "decoding"),
        (20, 40, "decoding"),
        (50, 60, "rollout transfer"),
        (80, 90, "weight updates"),
    ]
    assert activity.busy[4] == [(38, 43, "rewards"), (43, 45, "rewards")]  # two samples at once count once


def test_shares_are_means_over_the_ranks_of_a_role() -> None:
    trainer, generators, reward = role_shares(make_step(*ROWS))
    assert (trainer.roles, trainer.num_ranks) == (("trainer",), 1)
    assert trainer.busy == pytest.approx({"training": 20e-6, "weight updates": 10e-6, "rollout transfer": 8e-6})
    assert next(iter(trainer.waiting)) == "generation" and trainer.waiting["generation"] == pytest.approx(40e-6)
    assert generators.num_ranks == 2
    assert generators.busy == pytest.approx({"decoding": 25e-6, "weight updates": 9e-6, "rollout transfer": 5e-6})
    assert generators.waiting["slower replicas"] == pytest.approx(15e-6)
    assert generators.waiting["training"] == pytest.approx(20e-6)
    assert reward.busy == pytest.approx({"rewards": 7e-6})


def test_in_nested_waits_the_inner_one_counts_and_other_steps_are_cut_off() -> None:
    rows = (
        WaitRow("rollouts", -30, 90),
        WaitRow("FinishSave", 10, 20),
        CommandRow(1, "SaveState", 1, -10, 15),
        CommandRow(1, "Export", 2, 95, 50),
    )
    activity = RankActivity(make_step(*rows))
    assert activity.busy[1] == [(0, 5, "saves"), (95, 100, "saves")]
    assert activity.waiting(1) == [
        (5, 10, "scheduling"),
        (10, 30, "saves"),
        (30, 60, "scheduling"),
        (60, 95, "the controller"),
    ]


def test_the_way_of_a_message_is_not_charged_to_slower_ranks() -> None:
    waits = WaitRow("TrainStep", 10, 80)
    alone = RankActivity(make_step(waits, CommandRow(1, "TrainStep", 1, 20, 60)))
    assert alone.waiting(1) == [
        (0, 10, "the controller"),
        (10, 20, "the controller"),
        (80, 90, "the controller"),
        (90, 100, "the controller"),
    ]
    assert alone.waiting(2) == [(0, 10, "the controller"), (10, 90, "training"), (90, 100, "the controller")]
    both = RankActivity(make_step(waits, CommandRow(1, "TrainStep", 1, 20, 60), CommandRow(2, "TrainStep", 1, 30, 55)))
    assert both.waiting(1)[2:4] == [(80, 85, "slower ranks in training"), (85, 90, "the controller")]
    assert both.waiting(2)[1:3] == [(10, 20, "the controller"), (20, 30, "slower ranks in training")]


def test_work_beside_a_command_counts_only_where_the_rank_executes_none() -> None:
    roles = (("controller",), ("generator", "reward"))
    rows = ChunkRow(1, 1, 10, 30, 64, 8, 0), WorkRow("reward", 1, 1, "maths", 5, 50), WorkRow("turn", 1, 2, "x", 50, 20)
    busy = RankActivity(make_step(*rows, roles=roles)).busy[1]
    assert busy == [(5, 10, "rewards"), (10, 40, "decoding"), (40, 55, "rewards"), (55, 70, "environments")]


def test_busy_and_waiting_fill_the_step_whatever_happened() -> None:
    rng = random.Random(0)
    names = ("TrainStep", "UpdateWeights", "Logprobs", "Ask", "no such command")
    for _ in range(50):
        rows: list[TimelineRow] = []
        for _ in range(rng.randrange(60)):
            start, duration, rank = rng.randrange(-50, 1100), rng.randrange(300), rng.randrange(5)
            rows += rng.choice(
                (
                    [WaitRow(rng.choice((*names, "rollouts", "validation")), start, duration)],
                    [CommandRow(rank, rng.choice(names), 1, start, duration)],
                    [ChunkRow(rank, 1, start, duration, 1, 1, 0)],
                    [WorkRow(rng.choice(("reward", "turn")), rank, 1, "", start, duration)],
                )
            )
        activity = RankActivity(make_step(*rows, length=1000))
        for rank in range(5):
            pieces = sorted([*activity.busy.get(rank, []), *activity.waiting(rank)])
            assert pieces[0][0] == 0 and pieces[-1][1] == 1000
            assert all(before[1] == after[0] for before, after in pairwise(pieces))
