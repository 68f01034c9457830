"""The scheduler's samples: their states, the load of their replicas, and the commands to these replicas.

A sample is WAITING for room on a replica, RUNNING there, SCORING, then DONE. A sample with an environment alternates
between RUNNING, ACTING (its environment acts; its slot is free) and ANSWERED (waiting for a slot of its replica). Its
environment also starts it, so it may be ACTING before it has a token. After its episode it is DONE, or SCORING if a
reward is added. Dropped samples are forgotten; later events about them are counted (late_events) and ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from hpcrl.rollout.scheduling.accounts import Tally
from hpcrl.rollout.scheduling.events import (
    REPLICA_LOST,
    Aborted,
    Answered,
    Continue,
    Decoded,
    DoneSample,
    Drop,
    Generate,
    Outbox,
    Played,
    ReplicaLost,
    Rewarded,
    SamplesFailed,
    SchedulerCommand,
    SchedulerEvent,
    ScorerLost,
    SendToScorer,
    SpeedChanged,
)
from hpcrl.rollout.scheduling.groups import LiveSample, State, with_score
from hpcrl.rollout.scheduling.replicas import Replica, Replicas, Waiting
from hpcrl.rollout.types import FinishReason


class Samples:
    """The samples that are neither dropped nor taken. `waiting` are the samples without a replica."""

    def __init__(self, capacities: Mapping[int, int], tally: Tally, speed_aware_routing: bool):
        self.replicas = Replicas(capacities)
        self._tally, self._speed_aware_routing = tally, speed_aware_routing
        self._living: dict[int, LiveSample] = {}
        self.waiting = Waiting(self._living)
        self._orders = Outbox()
        self._touched: set[int] = set()  # replicas that may be able to continue answered samples

    # -- events

    def observe(self, event: SchedulerEvent) -> Iterator[tuple[LiveSample, str]]:
        """Apply an event. Yields (sample, "") for samples that are DONE now, (sample, cause) if a sample cannot end.

        Handle the items one by one: dropping other members of a sample's group changes which samples follow.
        """
        match event:
            case Decoded():
                yield from self._decoded(event)
            case Rewarded():
                sample = self._find(event.sample_id, State.RUNNING, State.SCORING, State.ACTING)
                if sample is not None and not self._is_early(sample, event):
                    self._move(sample, State.DONE)
                    sample.done = with_score(sample.done, event)
                    self._tally.count("score_errors", bool(sample.done.error))
                    sample.group.num_done += sample is not sample.group.greedy
                    yield sample, ""
            case Played():
                sample = self._find(event.sample_id, State.RUNNING, State.ACTING)
                if sample is not None and not self._is_early(sample, event):
                    self._move(sample, State.SCORING)
                    sample.done = replace(
                        sample.done, reward=event.reward, turn_rewards=event.turn_rewards, metrics=event.metrics
                    )
                    self._orders.put(SendToScorer, sample.replica, sample.id)
            case Answered():
                for sample_id in event.sample_ids:
                    sample = self._find(sample_id, State.RUNNING, State.ACTING)
                    if sample is not None and not self._is_early(sample, event):
                        self._move(sample, State.ANSWERED)
                        self.replicas[sample.replica].answered.append(sample_id)
            case Aborted():
                for _, length in event.lengths:
                    if length:  # 0: the sample still waited in the engine
                        self._tally.record("aborted_length", length)
            case SamplesFailed():
                for sample_id in event.sample_ids:
                    if (sample := self._find(sample_id, *State)) is not None:
                        yield sample, event.cause
            case ScorerLost():
                for sample_id in event.sample_ids:
                    if (sample := self._find(sample_id, State.SCORING)) is not None:
                        self._orders.put(SendToScorer, sample.replica, sample_id)
            case ReplicaLost():
                yield from self._replica_lost(event.replica)
            case SpeedChanged():
                if event.replica in self.replicas and self._speed_aware_routing:
                    self.replicas.tell_speed(event.replica, event.speed)

    def _decoded(self, event: Decoded) -> Iterator[tuple[LiveSample, str]]:
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
            if (sample := self._living.get(sample_id)) is not None:  # None: dropped with another member of its group
                yield sample, REPLICA_LOST
                self.forget(sample)

    @staticmethod
    def _is_early(sample: LiveSample, event: Rewarded | Answered | Played) -> bool:
        """Whether the event overtook the preceding Decoded, which another rank sends; then the sample stores it."""
        if sample.state is State.RUNNING:
            sample.early = event
        return sample.state is State.RUNNING

    def _find(self, sample_id: int, *states: State) -> LiveSample | None:
        """The sample if it is in one of these states; otherwise None, and the event counts in late_events."""
        sample = self._living.get(sample_id)
        if sample is not None and sample.state in states:
            return sample
        self._tally.count("late_events")
        return None

    def complete_groups(self, held: Iterable[int]) -> tuple[list[list[int]], list[int]]:
        """See RolloutScheduler.complete_groups()."""
        groups: dict[int, list[LiveSample]] = {}
        unwanted = []
        for sample_id in held:
            sample = self._living.get(sample_id)
            if sample is None:
                unwanted.append(sample_id)
            elif sample.state is State.SCORING:  # otherwise its replica has not reported its end yet
                groups.setdefault(sample.group.uid, []).append(sample)
        complete = []
        for samples in groups.values():
            group = samples[0].group
            missing = max(group.keep - group.num_done, 0)  # samples without a scorer are done already
            greedy = [sample.id for sample in samples if sample is group.greedy]
            sampled = sorted(sample.id for sample in samples if sample is not group.greedy)
            if len(sampled) >= missing and (greedy or group.is_greedy_done):
                complete.append(sampled[:missing] + greedy)
        return [ids for ids in complete if ids], unwanted

    # -- decisions

    def add(self, sample: LiveSample) -> None:
        """Add a sample that waits for its first replica."""
        self._living[sample.id] = sample
        self.waiting.add(sample)

    def restore(self, sample: LiveSample) -> None:
        """Add a sample that is DONE, and assign it to its replica if that replica is alive."""
        self._living[sample.id] = sample
        if (replica := self.replicas.get(sample.replica)) is not None:
            replica.samples.add(sample.id)

    def admit(self, sample: LiveSample, name: int) -> None:
        """Let a replica generate a sample that was WAITING."""
        sample.replica = name
        self.replicas[name].samples.add(sample.id)
        self._move(sample, State.RUNNING)
        self._orders.put(Generate, name, sample.id)

    def continue_answered(self, turns: Callable[[Replica], Iterator[int]]) -> None:
        """Let replicas generate the next turn of the answered samples that `turns` yields."""
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
        """Drop a sample and count its tokens as wasted; the replica reports the tokens of a sample that is decoding."""
        if sample.id in self._living and sample.state not in (State.WAITING, State.RUNNING):
            self._tally.record("aborted_length", sample.done.num_tokens)
        self.drop(sample)

    def drop(self, sample: LiveSample) -> None:
        """Forget the sample, also on its replica."""
        if sample.id in self._living and sample.replica >= 0:
            self._orders.put(Drop, sample.replica, sample.id)
        self.forget(sample)

    def forget(self, sample: LiveSample) -> None:
        """Forget the sample; its replica keeps its tokens."""
        if self._living.pop(sample.id, None) is None:
            return
        if sample.state is State.WAITING:
            self.waiting.size -= 1
        if sample.state is not State.DONE:
            self._tally.count("aborted")
            self._move(sample, State.DONE)
        if sample.replica in self.replicas:
            self.replicas[sample.replica].samples.discard(sample.id)

    def commands(self) -> list[SchedulerCommand]:
        """New commands to replicas since the last call, Drops first."""
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
