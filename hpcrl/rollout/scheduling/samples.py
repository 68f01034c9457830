"""The samples that the scheduler follows: the state of each, what their replicas carry, and what these are told to do.

A sample is WAITING for room, RUNNING on a replica, SCORING, then DONE; one with an environment alternates between
RUNNING, ACTING (its environment has it, its slot is free) and ANSWERED (waiting for a slot of its replica), and begins
with its environment: it is ACTING before it has a token. After its episode it is DONE, or SCORING where a reward is
added. Dropped samples leave the table; what arrives about them later is counted as stale and ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from hpcrl.rollout.scheduling.events import (
    REPLICA_LOST,
    Aborted,
    Admit,
    Answered,
    BurstDone,
    Command,
    Continue,
    DoneSample,
    Drop,
    Event,
    Failed,
    Paced,
    Played,
    ReplicaLost,
    Rescore,
    Scored,
    ScorerLost,
)
from hpcrl.rollout.scheduling.groups import LiveSample, State, with_score
from hpcrl.rollout.scheduling.outbox import Outbox
from hpcrl.rollout.scheduling.replicas import Replica, Replicas
from hpcrl.rollout.scheduling.tally import Tally
from hpcrl.rollout.scheduling.waiting import Waiting
from hpcrl.rollout.types import FinishReason


class Samples:
    """Living samples by id. `replicas`: where they live; `waiting`: those that have no replica yet."""

    def __init__(self, capacities: Mapping[int, int], tally: Tally, spare_slow_replicas: bool):
        self.replicas = Replicas(capacities)
        self._tally, self._spare_slow_replicas = tally, spare_slow_replicas
        self._living: dict[int, LiveSample] = {}
        self.waiting = Waiting(self._living)
        self._orders = Outbox()
        self._touched: set[int] = set()  # replicas that may be able to continue answered samples

    # -- what happens to them

    def observe(self, event: Event) -> Iterator[tuple[LiveSample, str]]:
        """Take in an event: the samples that are DONE by it, and those that cannot end, with the cause.

        What the caller does about one counts for those that follow: its siblings may be dropped by then."""
        match event:
            case BurstDone():
                yield from self._burst_done(event)
            case Scored():
                sample = self._find(event.sample_id, State.RUNNING, State.SCORING, State.ACTING)
                if sample is not None and not self._is_early(sample, event):
                    self._move(sample, State.DONE)
                    sample.done = with_score(sample.done, event)
                    self._tally.count("score_errors", bool(sample.done.error))
                    sample.group.num_done += 1
                    yield sample, ""
            case Played():
                sample = self._find(event.sample_id, State.RUNNING, State.ACTING)
                if sample is not None and not self._is_early(sample, event):
                    self._move(sample, State.SCORING)
                    sample.done = replace(sample.done, reward=event.reward, turn_rewards=event.turn_rewards)
                    self._orders.put(Rescore, sample.replica, sample.id)
            case Answered():
                for sample_id in event.sample_ids:
                    sample = self._find(sample_id, State.RUNNING, State.ACTING)
                    if sample is not None and not self._is_early(sample, event):
                        self._move(sample, State.ANSWERED)
                        self.replicas[sample.replica].answered.append(sample_id)
            case Aborted():
                for _, length in event.lengths:
                    if length:  # others were still waiting in the engine
                        self._tally.record("aborted_length", length)
            case Failed():
                for sample_id in event.sample_ids:
                    if (sample := self._find(sample_id, *State)) is not None:
                        yield sample, event.cause
            case ScorerLost():
                for sample_id in event.sample_ids:
                    if (sample := self._find(sample_id, State.SCORING)) is not None:
                        self._orders.put(Rescore, sample.replica, sample_id)
            case ReplicaLost():
                yield from self._replica_lost(event.replica)
            case Paced():
                if event.replica in self.replicas and self._spare_slow_replicas:
                    self.replicas.tell_speed(event.replica, event.speed)

    def _burst_done(self, event: BurstDone) -> Iterator[tuple[LiveSample, str]]:
        ends = [(i, num_tokens, FinishReason(reason), State.SCORING) for i, num_tokens, reason in event.finished]
        ends += [(i, num_tokens, FinishReason.STOP, State.ACTING) for i, num_tokens in event.turns]
        for sample_id, num_tokens, reason, state in ends:
            if (sample := self._find(sample_id, State.RUNNING)) is None:
                continue
            self._move(sample, state)
            sample.done = DoneSample(sample_id, sample.replica, num_tokens, reason, 0.0, 0.0)
            early, sample.early = sample.early, None
            if early is not None:
                yield from self.observe(early)

    def _replica_lost(self, name: int) -> Iterator[tuple[LiveSample, str]]:
        if name not in self.replicas:
            return
        for sample_id in sorted(self.replicas.pop(name).samples):
            if (sample := self._living.get(sample_id)) is not None:  # else its group was given up for a sibling
                yield sample, REPLICA_LOST
                self.forget(sample)

    @staticmethod
    def _is_early(sample: LiveSample, event: Scored | Answered | Played) -> bool:
        """Keep an answer that overtook the BurstDone it belongs to: they come from different ranks."""
        if sample.state is State.RUNNING:
            sample.early = event
        return sample.state is State.RUNNING

    def _find(self, sample_id: int, *states: State) -> LiveSample | None:
        """The sample, where it is in one of these states; others, dropped or of another scheduler, are counted."""
        sample = self._living.get(sample_id)
        if sample is not None and sample.state in states:
            return sample
        self._tally.count("stale")
        return None

    def together(self, held: Iterable[int]) -> tuple[list[list[int]], list[int]]:
        """See RolloutScheduler.together()."""
        groups: dict[int, list[LiveSample]] = {}
        unwanted = []
        for sample_id in held:
            sample = self._living.get(sample_id)
            if sample is None:
                unwanted.append(sample_id)
            elif sample.state is State.SCORING:  # else its replica has not yet told of its end
                groups.setdefault(sample.group.uid, []).append(sample)
        complete = []
        for samples in groups.values():
            missing = samples[0].group.keep - samples[0].group.num_done  # one that ended without a scorer is done
            if len(samples) >= missing:
                complete.append(sorted(sample.id for sample in samples)[: max(missing, 0)])
        return [ids for ids in complete if ids], unwanted

    # -- what is decided about them

    def add(self, sample: LiveSample) -> None:
        """Follow a sample, which waits for its first replica."""
        self._living[sample.id] = sample
        self.waiting.add(sample)

    def restore(self, sample: LiveSample) -> None:
        """Follow a sample that is DONE, on its replica where that is left."""
        self._living[sample.id] = sample
        if (replica := self.replicas.get(sample.replica)) is not None:
            replica.samples.add(sample.id)

    def admit(self, sample: LiveSample, name: int) -> None:
        """Have a replica generate a sample that waited for one."""
        sample.replica = name
        self.replicas[name].samples.add(sample.id)
        self._move(sample, State.RUNNING)
        self._orders.put(Admit, name, sample.id)

    def continue_answered(self, turns: Callable[[Replica], Iterator[int]]) -> None:
        """Have replicas generate the next turn of answered samples: of each those that `turns` names, one by one."""
        for name in sorted(self._touched):
            replica = self.replicas.get(name)
            if replica is None or not replica.answered:
                continue
            for sample_id in turns(replica):
                if (sample := self._living.get(sample_id)) is not None:
                    self._move(sample, State.RUNNING)
                    self._orders.put(Continue, name, sample_id)
        self._touched.clear()

    def pause(self, names: frozenset[int]) -> None:
        """See RolloutScheduler.pause()."""
        self._touched.update(self.replicas.pause(names))

    def abort(self, sample: LiveSample) -> None:
        """Drop a sample whose tokens were in vain; one that decodes is counted by its replica."""
        if sample.id in self._living and sample.state not in (State.WAITING, State.RUNNING):
            self._tally.record("aborted_length", sample.done.num_tokens)
        self.drop(sample)

    def drop(self, sample: LiveSample) -> None:
        """Forget the sample and have its replica forget it."""
        if sample.id in self._living and sample.replica >= 0:
            self._orders.put(Drop, sample.replica, sample.id)
        self.forget(sample)

    def forget(self, sample: LiveSample) -> None:
        """Follow the sample no more; its replica keeps its tokens."""
        if self._living.pop(sample.id, None) is None:
            return
        if sample.state is State.WAITING:
            self.waiting.size -= 1
        if sample.state is not State.DONE:
            self._tally.count("aborted")
            self._move(sample, State.DONE)
        if sample.replica in self.replicas:
            self.replicas[sample.replica].samples.discard(sample.id)

    def commands(self) -> list[Command]:
        """What replicas are to do since the last call, Drops first."""
        return self._orders.take(self.replicas, self._living)

    def _move(self, sample: LiveSample, state: State) -> None:
        """Change a sample's state and its replica's counts."""
        old, sample.state = sample.state, state
        if (replica := self.replicas.get(sample.replica)) is None:
            return
        replica.acting += (state is State.ACTING) - (old is State.ACTING)
        change = (state is State.RUNNING) - (old is State.RUNNING)
        if change:
            self.replicas.occupy(sample.replica, change, sample.weight)
        self._touched.add(sample.replica)
