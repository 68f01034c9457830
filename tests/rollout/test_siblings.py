"""Group rewards: group members are collected at one scorer, and every group is scored once, as a whole."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from hpcrl.messaging import messages as m
from hpcrl.rollout.loop import RolloutLoop
from hpcrl.rollout.scheduling.policies import SchedulerConfig
from hpcrl.rollout.scheduling.scheduler import RolloutScheduler
from hpcrl.rollout.types import FIRST_VALIDATION_UID, receiver_of, split_sample_id
from tests.rollout.ranks import Ranks
from tests.rollout.test_loop import SAMPLING, draw_from, prompts

REPLICAS = {1: 2, 2: 2}


class GroupRanks(Ranks):
    """Replicas and scorers whose reward scores groups; a sample takes a number of decode chunks by its member
    number."""

    def __init__(self, scorers: list[int]):
        super().__init__()
        self.scorers = scorers
        self.waiting: dict[int, set[int]] = {scorer: set() for scorer in scorers}
        self.scored: list[list[int]] = []
        self.unwanted: list[int] = []

    def send(self, rank: int, command: m.Command) -> int:
        scores, self._scores = self._scores, deque()  # events of per-sample scorers are left out
        seq = super().send(rank, command)
        self._scores = scores
        running = self._running[rank]
        match command:
            case m.Admit():
                running |= {sample: 1 + split_sample_id(sample)[2] for sample, _ in command.samples}
            case m.DecodeChunk():
                finished = [end.sample for _, event in self._events for end in self._ended(event, seq)]
                self._arrive(finished, command.receivers)
            case m.Rescore():
                self._arrive(command.samples, command.receivers)
            case m.ScoreGroup():
                assert set(command.samples) <= self.waiting[rank], "all of them are there"
                self.waiting[rank] -= set(command.samples)
                self.scored.append(command.samples)
                scored = [m.ScoredSample(sample, float(sample % 2), float(sample % 2)) for sample in command.samples]
                self._scores.append((rank, m.Scored(scored)))
            case m.DropAwaiting():
                assert set(command.samples) <= self.waiting[rank]
                self.waiting[rank] -= set(command.samples)
                self.unwanted += command.samples
        return seq

    def _ended(self, event: Any, seq: int) -> list[m.Ended]:
        return event.finished if isinstance(event, m.DecodeChunkDone) and event.seq == seq else []

    def _arrive(self, samples: list[int], receivers: list[int]) -> None:
        for sample in samples:
            scorer = receiver_of(sample, self.scorers, receivers)
            self.waiting[scorer].add(sample)
            self._events.appendleft((scorer, m.AwaitGroup([sample])))  # it overtakes the DecodeChunkDone


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("scorers", [[3, 4], [1, 2]], ids=["apart", "with the replicas"])
def test_group_members_from_several_replicas_are_scored_together(deterministic: bool, scorers: list[int]) -> None:
    ranks = GroupRanks(scorers)
    loop = RolloutLoop(ranks, [[1], [2]], scorers, [], seed=0, decode_chunk_tokens=4, deterministic=deterministic)  # type: ignore[arg-type]
    scheduler = RolloutScheduler(SchedulerConfig(4, deterministic=deterministic, group_affinity=False), REPLICAS)
    known, draw, spread = {}, draw_from(prompts()), False
    for version in range(3):
        scheduler.begin_step(version, 2)
        collected = loop.collect(scheduler, known, draw, SAMPLING)
        assert len(collected.groups) == 2
        for group in collected.groups:
            assert [sample.reward for sample in group.samples] == [float(sample.id % 2) for sample in group.samples]
            assert sorted(sample.id for sample in group.samples) in map(sorted, ranks.scored)
            spread |= {sample.replica for sample in group.samples} == {1, 2}
    assert spread or deterministic, "siblings came from two replicas"
    for samples in ranks.scored:
        assert len(samples) == 4 and len({split_sample_id(sample)[0] for sample in samples}) == 1
    assert len({sample for samples in ranks.scored for sample in samples}) == 4 * len(ranks.scored), "each once"


class EarlyRanks(GroupRanks):
    """A scorer's events arrive some iterations before the DecodeChunkDone of the same responses."""

    def events(self) -> list[tuple[int, m.Event]]:
        early = [said for said in self._events if isinstance(said[1], m.AwaitGroup)]
        if not early and self._scores:
            early, self._scores = list(self._scores), deque()
        self._events = deque(said for said in self._events if said not in early)
        return early or super().events()


@pytest.mark.parametrize("ranks_class", [GroupRanks, EarlyRanks])
def test_spare_members_that_are_not_used_are_forgotten(ranks_class: type[GroupRanks]) -> None:
    ranks = ranks_class([3])
    loop = RolloutLoop(ranks, [[1], [2]], [3], [], seed=0, decode_chunk_tokens=4, deterministic=False)  # type: ignore[arg-type]
    scheduler = RolloutScheduler(SchedulerConfig(2, extra_members=2), REPLICAS)
    known, draw = {}, draw_from(prompts())
    for version in range(3):
        scheduler.begin_step(version, 2)
        groups = loop.collect(scheduler, known, draw, SAMPLING).groups
        assert all(len(group.samples) == 2 for group in groups)
    assert all(len(samples) == 2 for samples in ranks.scored)
    assert not loop._awaited.pending and not ranks.waiting[3]


class DyingRanks(GroupRanks):
    """The first replica's process ends with its first decode chunk that finishes a response, with this order of
    messages."""

    def __init__(self, order: list[str]):
        super().__init__([3])
        self.order = order

    def send(self, rank: int, command: m.Command) -> int:
        if rank in self.lost:
            return -1
        seq = super().send(rank, command)
        if rank == 1 and self.waiting[3] and isinstance(command, m.DecodeChunk):
            said = {type(event): (sender, event) for sender, event in self._events}
            said[m.Lost] = (1, m.Lost(1, "killed"))
            self._events.clear()
            self._events.extend(said[kind] for kind in map(m.__dict__.get, self.order))
            self.lost.add(1)
        return seq


@pytest.mark.parametrize(
    "order",
    [["AwaitGroup", "Lost"], ["Lost", "AwaitGroup"], ["DecodeChunkDone", "Lost", "AwaitGroup"]],
    ids=" ".join,
)
def test_a_response_of_a_lost_replica_does_not_remain_at_its_scorer(order: list[str]) -> None:
    """The other members never arrive: the group restarts with new members."""
    ranks = DyingRanks(order)
    loop = RolloutLoop(ranks, [[1], [2]], [3], [], seed=0, decode_chunk_tokens=4, deterministic=False)  # type: ignore[arg-type]
    scheduler = RolloutScheduler(SchedulerConfig(2, max_staleness=1), REPLICAS)
    scheduler.begin_step(0, 2)
    groups = loop.collect(scheduler, {}, draw_from(prompts()), SAMPLING).groups
    assert ranks.lost == {1} and len(groups) == 2
    assert len(ranks.unwanted) == 1 and split_sample_id(ranks.unwanted[0])[2] == 0
    trained = {sample.id for group in groups for sample in group.samples}
    assert trained.isdisjoint(ranks.unwanted) and not ranks.waiting[3] and not loop._awaited._samples


def test_validation_samples_are_groups_of_one() -> None:
    ranks = GroupRanks([3])
    loop = RolloutLoop(ranks, [[1], [2]], [3], [], seed=0, decode_chunk_tokens=4, deterministic=True)  # type: ignore[arg-type]
    scheduler = RolloutScheduler(SchedulerConfig(1, deterministic=True, accept_errors=True), REPLICAS)
    scheduler.begin_step(0, 3)
    collected = loop.collect(scheduler, {}, draw_from(prompts(FIRST_VALIDATION_UID, 3)), SAMPLING)
    assert len(collected.groups) == 3 and all(len(samples) == 1 for samples in ranks.scored)
