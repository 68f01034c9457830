"""The rollout loop around a scheduler, with scripted ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from hpcrl.controller.main import _explain
from hpcrl.messaging import messages as m
from hpcrl.rollout.loop import BackgroundError, RolloutLoop
from hpcrl.rollout.scheduling.policies import SchedulerConfig
from hpcrl.rollout.scheduling.scheduler import RolloutExhausted, RolloutScheduler
from hpcrl.rollout.types import FIRST_VALIDATION_UID, Prompt, Sizes, make_sample_id, receiver_of, split_sample_id
from hpcrl.system.exit_codes import ExitCode
from tests.rollout.ranks import SCORER, Ranks

GENERATOR = 1
SAMPLING = m.Sampling(8, 1.0, 1.0, 0, 0.0, [])


def make_loop(ranks: Any, deterministic: bool = False) -> RolloutLoop:
    return RolloutLoop(ranks, [[GENERATOR]], [SCORER], [], seed=0, decode_chunk_tokens=4, deterministic=deterministic)


def prompts(first: int = 0, number: int = 1_000_000) -> Iterator[Prompt]:
    return (Prompt(uid, "maths", 0, 0, (1, 2), "") for uid in range(first, first + number))


def draw_from(source: Iterator[Prompt]) -> Callable[[int], list[Prompt]]:
    return lambda count: [prompt for _, prompt in zip(range(count), source, strict=False)]


def steps(loop: RolloutLoop, config: SchedulerConfig, needs: list[int], source: Iterator[Prompt]) -> list[Any]:
    """The collected batches of one scheduler's steps."""
    scheduler, known, draw, harvests = RolloutScheduler(config, {GENERATOR: 8}), {}, draw_from(source), []
    for version, need in enumerate(needs):
        scheduler.begin_step(version, need)
        harvests.append(loop.collect(scheduler, known, draw, SAMPLING))
    return harvests


def fails_on(uid: int) -> Callable[[int], Any]:
    return lambda sample: (0.0, "timeout") if split_sample_id(sample)[0] == uid else (1.0, "")


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_validation_prompt_that_cannot_be_scored_scores_zero(deterministic: bool) -> None:
    ranks = Ranks(score=fails_on(FIRST_VALIDATION_UID + 1))
    config = SchedulerConfig(1, accept_errors=True, deterministic=deterministic)
    (collected,) = steps(make_loop(ranks, deterministic), config, [3], prompts(FIRST_VALIDATION_UID, 3))
    assert [group.samples[0].score for group in collected.groups] == [1.0, 0.0, 1.0]
    assert collected.stats["domain/maths/score"].total == 2.0


@pytest.mark.parametrize("deterministic", [False, True])
def test_collecting_that_can_never_end_is_an_error(deterministic: bool) -> None:
    """The prompt restarts twice, which counts no further group, and then fails; there is no other prompt."""
    ranks = Ranks(score=fails_on(1))
    config = SchedulerConfig(1, deterministic=deterministic)
    with pytest.raises(
        RolloutExhausted, match=r"3 groups were started and 2 of 3 .*failed 1.*: no response .* no prompt is left"
    ):
        steps(make_loop(ranks, deterministic), config, [3], prompts(0, 3))


def test_bad_data_drawn_in_the_background_does_not_fail_the_current_step() -> None:
    def draw(count: int) -> list[Prompt]:
        fresh = list(zip(range(count), source, strict=False))
        if fresh and fresh[-1][1].uid > 2:
            raise ValueError("train.jsonl:812: the prompt has 5000 tokens")
        return [prompt for _, prompt in fresh]

    loop, source = make_loop(Ranks()), prompts()
    scheduler = RolloutScheduler(SchedulerConfig(1, max_staleness=1), {GENERATOR: 1})
    scheduler.begin_step(0, 1)
    loop.collect(scheduler, {}, draw, SAMPLING)
    with pytest.raises(BackgroundError, match=r"train\.jsonl:812") as raised:
        for _ in range(20):
            loop.background(loop._controller.events() if loop._replicas[GENERATOR].num_chunks else [])
            if scheduler.ready():
                scheduler.take_batch()
            scheduler.begin_step(scheduler.version + 1, 1)
    assert isinstance(raised.value.__cause__, ValueError)
    code, text = _explain(raised.value, built=True)
    assert code is ExitCode.FAILED and text.startswith("ValueError: train.jsonl:812")


def test_a_late_score_of_a_validation_sample_does_not_disturb_training() -> None:
    ranks = Ranks()
    loop = make_loop(ranks)
    steps(loop, SchedulerConfig(1, accept_errors=True), [2], prompts(FIRST_VALIDATION_UID, 2))
    ranks.say(SCORER, m.Scored([m.ScoredSample(make_sample_id(FIRST_VALIDATION_UID, 0, 0), 1.0, 1.0)]))
    (collected,) = steps(loop, SchedulerConfig(2), [2], prompts())
    assert len(collected.groups) == 2
    # Nor the same sample's next evaluation: its answer is the new one, not the one that came too late.
    ranks._score = lambda _: (0.5, "")
    (collected,) = steps(loop, SchedulerConfig(1), [1], prompts(FIRST_VALIDATION_UID, 1))
    assert [group.samples[0].reward for group in collected.groups] == [0.5]


def test_an_answer_left_behind_by_a_lost_replica_ends_with_its_evaluation() -> None:
    """With another stream still open: otherwise a later response with the same id would never be awaited."""
    ranks = Ranks()
    loop = make_loop(ranks)
    steps(loop, SchedulerConfig(1, max_staleness=1), [2], prompts())
    left = make_sample_id(FIRST_VALIDATION_UID, 5, 0)  # its replica died before it said DecodeChunkDone
    ranks.say(SCORER, m.Scored([m.ScoredSample(left, 1.0, 1.0)]))
    scheduler = RolloutScheduler(SchedulerConfig(1), {GENERATOR: 8})
    scheduler.begin_step(0, 2)
    loop.collect(scheduler, {}, draw_from(prompts(FIRST_VALIDATION_UID, 2)), SAMPLING)
    assert loop._streams and not loop._awaited._samples


def test_losing_a_rank_moves_only_its_environments() -> None:
    ranks, samples = [5, 6, 7, 8], [make_sample_id(uid, 0, 3) for uid in range(4 * 6 * 50)]
    alive, places = set(ranks), {sample: receiver_of(sample, ranks, ranks) for sample in samples}
    assert Counter(places.values()) == dict.fromkeys(ranks, 300)
    for lost in (6, 8, 5):
        alive.remove(lost)
        after = {sample: receiver_of(sample, ranks, alive) for sample in samples}
        assert all(after[sample] == place for sample, place in places.items() if place != lost)
        assert set(Counter(after.values()).values()) == {1200 // len(alive)}
        places = after
    with pytest.raises(ValueError, match=r"none of the ranks \[5, 6, 7, 8\] is alive"):
        receiver_of(samples[0], ranks, [])


def test_environments_are_notified_once_of_a_lost_replica() -> None:
    ranks = Ranks()
    loop = RolloutLoop(ranks, [[1], [2]], [SCORER], [3, 4, 5], seed=0, decode_chunk_tokens=4, deterministic=False)  # type: ignore[arg-type]
    ranks.lost |= {1, 4}
    loop.tell_lost()
    loop.tell_lost()
    assert sorted(ranks.sent, key=lambda sent: sent[0]) == [(3, m.EndEpisodes(1)), (5, m.EndEpisodes(1))]


def test_an_environment_is_not_moved_if_an_unrelated_rank_is_lost() -> None:
    """Not moved to the replica itself, although only replicas are left."""
    ranks = Ranks()
    loop = RolloutLoop(ranks, [[1], [3]], [], [1, 3, 4], seed=0, decode_chunk_tokens=4, deterministic=False)

    def place_of(uid: int) -> int:
        return receiver_of(make_sample_id(uid, 0, 0), [1, 3, 4], loop._alive([1, 3, 4], loop._replicas[1]))

    before = {uid: place_of(uid) for uid in range(12)}
    ranks.lost.add(4)
    for uid, place in before.items():
        assert place in (4, place_of(uid))


def test_replicas_that_train_get_no_background_requests() -> None:
    loop = RolloutLoop(Ranks(), [[1], [3]], [SCORER], [], seed=0, decode_chunk_tokens=4, deterministic=False, free=[3])
    scheduler, known, draw = (
        RolloutScheduler(SchedulerConfig(1, max_staleness=1), {1: 8, 3: 8}),
        {},
        draw_from(prompts()),
    )

    def paused() -> list[int]:
        return [rank for rank, replica in scheduler._samples.replicas.items() if replica.paused]

    for version in range(2):
        scheduler.begin_step(version, 4)
        loop.collect(scheduler, known, draw, SAMPLING)
        assert paused() == []
        loop.background([])
        assert paused() == [1]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_all_ranks_of_a_replica_get_the_same_commands_in_the_same_order(max_staleness: int) -> None:
    """Commands of all kinds, each sent to all ranks before the next. Only the first rank answers."""
    ranks = SplitRanks(bursts=lambda uid: 1 + 9 * (uid % 2))
    loop = RolloutLoop(
        ranks, [[1, 4], [3, 5]], [SCORER], [], seed=0, decode_chunk_tokens=4, deterministic=False, free=[1, 3]
    )
    scheduler = RolloutScheduler(SchedulerConfig(2, 2, max_staleness=max_staleness), {1: 8, 3: 8})
    known, draw = {}, draw_from(prompts())
    for version in range(3):
        scheduler.begin_step(version, 2)
        loop.forget(loop.collect(scheduler, known, draw, SAMPLING).groups)
    heard = {rank: [command for to, command in ranks.sent if to == rank] for rank in (1, 3, 4, 5)}
    assert heard[4] == heard[1] and heard[5] == heard[3]
    assert {m.Admit, m.DecodeChunk, m.DropSamples} <= {type(command) for command in heard[1]}
    assert max_staleness or m.AbortSamples in {type(command) for command in heard[1] + heard[3]}
    for (rank, command), (next_rank, same) in pairwise(ranks.sent):
        assert rank not in (1, 3) or (next_rank, same) == ({1: 4, 3: 5}[rank], command)


class SplitRanks(Ranks):
    """With replicas of several ranks, of which 4 and 5 are not the first."""

    def send(self, rank: int, command: m.Command) -> int:
        if rank not in (4, 5):
            return super().send(rank, command)
        self.sent.append((rank, command))
        return 0


def test_sizes_outlive_a_step_until_their_group_is_taken() -> None:
    """With max_staleness, groups that a step finishes ahead are trained by the next."""
    ranks = Ranks()
    loop = make_loop(ranks)
    first, second = steps(loop, SchedulerConfig(1, max_staleness=1), [2, 2], prompts())
    assert [group.version for group in second.groups] == [0, 0]
    for collected in (first, second):
        expected = {make_sample_id(group.uid, 0, 0): Sizes(10 + group.uid % 7, 4) for group in collected.groups}
        assert collected.sizes == expected


def test_sizes_of_dropped_samples_are_dropped() -> None:
    """Group members that ended before their group was dropped, and members that were aborted."""
    ranks = Ranks(bursts=lambda uid: 1 + 9 * (uid % 2), score=lambda sample: (1.0, ""))
    loop = make_loop(ranks)
    steps(loop, SchedulerConfig(2, extra_prompts=2), [1, 1, 1], prompts())
    assert any(isinstance(command, m.AbortSamples) for _, command in ranks.sent)
    replica = loop._replicas[GENERATOR]
    assert not replica.sizes and not replica._dropped and not loop._awaited._samples


def test_a_scorer_is_not_expected_to_score_responses_that_a_lost_replica_never_sent() -> None:
    ranks = Ranks()
    loop = make_loop(ranks)
    loop._reach(loop._replicas[GENERATOR], [make_sample_id(uid, 0, 0) for uid in range(3)], [SCORER], acting=False)
    ranks.lost.add(GENERATOR)
    loop.tell_lost()
    assert not loop._awaited._samples and not loop._awaited.pending


def test_the_cost_of_a_decode_chunk_does_not_grow_with_responses_being_scored() -> None:
    def cost(outstanding: int) -> float:
        """CPU-seconds of 500 decode chunks with one answer each while `outstanding` responses wait at the scorer."""
        loop = make_loop(Ranks())
        samples = [make_sample_id(FIRST_VALIDATION_UID + uid, 0, 0) for uid in range(outstanding)]
        loop._reach(loop._replicas[GENERATOR], samples, [SCORER], acting=False)
        before = time.thread_time()
        for uid in range(500):
            loop._reach(loop._replicas[GENERATOR], [make_sample_id(uid, 0, 0)], [SCORER], acting=False)
            loop._awaited.check()
            loop._answered(make_sample_id(uid, 0, 0))
        return time.thread_time() - before

    cost(0)
    assert cost(20_000) < 4 * cost(0)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_reward_is_added_to_the_environments_reward(deterministic: bool) -> None:
    """Rank 3 plays samples of even prompts, which rank 2 then scores; the others are only scored."""
    ranks = PlayedRanks()
    loop = RolloutLoop(ranks, [[GENERATOR]], [SCORER], [3], seed=0, decode_chunk_tokens=4, deterministic=deterministic)
    (collected,) = steps(loop, SchedulerConfig(2, deterministic=deterministic), [4], prompts(0, 4))
    rewards = {group.uid: [sample.reward for sample in group.samples] for group in collected.groups}
    assert rewards == {uid: [1.5, 1.5] if uid % 2 == 0 else [1.0, 1.0] for uid in range(4)}
    assert [sample.score for group in collected.groups for sample in group.samples] == [1.0] * 8
    turns = {group.uid: {sample.turn_rewards for sample in group.samples} for group in collected.groups}
    assert turns == {uid: {(0.25, 1.25)} if uid % 2 == 0 else {()} for uid in range(4)}
    assert collected.stats["domain/maths/score"].count == 8 and collected.stats["env/maths/success"].count == 4
    rescored = {sample for _, command in ranks.sent if isinstance(command, m.Rescore) for sample in command.samples}
    assert {split_sample_id(sample)[0] for sample in rescored} == {0, 2}
    assert not loop._awaited._samples and not loop._awaited.pending


class PlayedRanks(Ranks):
    """Episodes of one turn of prompts with even uids: begun, answered, played, and scored when they are sent on."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: set[int] = set()

    def send(self, rank: int, command: m.Command) -> int:
        if isinstance(command, m.Rescore):
            self.sent.append((rank, command))
            self._scores.append((SCORER, m.Scored([m.ScoredSample(sample, 1.0, 1.0) for sample in command.samples])))
            return 0
        return super().send(rank, command)

    def _done(self, rank: int, samples: list[int], reason: str) -> None:
        ended = [m.Ended(sample, 10, 4, reason) for sample in samples]
        for sample in samples:
            del self._running[rank][sample]
        turns = [end for end in ended if split_sample_id(end.sample)[0] % 2 == 0 and reason != "abort"]
        finished = [end for end in ended if end not in turns]
        for end in turns:
            over = end.sample in self._begun
            result = m.ScoredSample(
                end.sample, 0.5 * over, 0.0, "", {"success": 1.0} if over else {}, [0.25, 0.25][: 2 * over]
            )
            self.say(3, m.Observed(end.sample, over, result, add_reward=True))  # before the decode chunk is reported
            self._begun.add(end.sample)
        self.say(rank, m.DecodeChunkDone(self._seq, finished, turns, 4, 0.1))
