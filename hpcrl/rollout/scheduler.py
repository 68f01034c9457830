"""The rollout scheduler: which prompt is generated where, which groups make the batch, which are given up.

A pure state machine: no torch, no torch.distributed, no clock, no randomness. The loop feeds it events
(hpcrl.rollout.events) and carries out its commands:

    scheduler = RolloutScheduler(SchedulerConfig.of(config), replicas={replica: capacity, ...})
    scheduler.begin_step(version, need=config.rollout.num_prompts)
    while not scheduler.ready():
        scheduler.offer(uids of scheduler.wants() fresh prompts)
        for command in scheduler.plan(events that arrived):        # there may be none
            push it to command.replica
    groups = scheduler.take()                                      # `need` groups in order of uid
    ended = scheduler.settled()                                    # one Settled per prompt that ended
    stats = scheduler.metrics()                                    # name -> (sum, count, min, max), reset by the call

A prompt is known by its uid, a response by its sample id (hpcrl.rollout.types); the loop keeps prompts by uid until
they are settled. A sample is WAITING for room, RUNNING on a replica, SCORING, then DONE; one with an environment
alternates between RUNNING, ACTING (its environment has it, its slot is free) and ANSWERED (waiting for a slot of its
replica). Dropped samples leave the tables; what arrives about them later is counted as stale and ignored.

`capacity` is the number of requests a replica is given at once: its slots, plus as many as may wait there for the next
slot. Commands to one replica are carried out in the order given, so the room freed by a Drop is used by the Admit
behind it.

Default mode: samples go to the replica with the most room, siblings together where it suffices; the first `need` valid
groups make the batch; what else is in flight is dropped, its prompts return to the head of the queue. A prompt dropped
`max_attempts` times is waited for, so that long answers do not starve.
Deterministic mode: a wave of groups is spread over the replicas by sample id, all at once (engines queue what their
slots do not hold); the next wave starts when this one has ended; verdicts are passed in order of uid; the samples of a
replica take their next turn together. Commands and batches then follow from the samples' outcomes, never from the
order of events. Offer all that wants() asks for before plan().

Freshness: a group carries the version it was started under; begin_step() starts groups anew that are further behind
than max_lag allows. Deterministic mode generates nothing ahead.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hpcrl.rollout.events import (
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
    Group,
    ReplicaLost,
    Rescore,
    Scored,
    ScorerLost,
    Settled,
)
from hpcrl.rollout.groups import LiveGroup, LiveSample, State
from hpcrl.rollout.policies import SchedulerConfig, rejecting_filter
from hpcrl.rollout.routing import Replicas
from hpcrl.rollout.tally import Tally
from hpcrl.rollout.types import Disposition, FinishReason

COUNTS = ("group_filter_count", "query_use_count", "aborted", "cancelled", "failed", "score_errors", "stale")


class RolloutExhausted(ValueError):
    """The step can get no batch; the message has the counts."""


class RolloutScheduler:
    """See the module's docstring for its use."""

    def __init__(self, config: SchedulerConfig, replicas: Mapping[int, int]):
        self.config = config
        self.version = -1
        self._lead = 0.0 if config.deterministic else config.max_lag
        self._replicas = Replicas(replicas)
        self._need = 0
        self._closed = True  # between take() and begin_step()
        self._newest_uid = -1
        self._queue: list[int] = []  # heap of uids to start; old prompts come first
        self._tries: dict[int, tuple[int, int]] = {}  # uid -> (next attempt, failures) of requeued prompts
        self._open: dict[int, LiveGroup] = {}  # started, no verdict yet
        self._overdue: set[int] = set()  # of these, the ones the batch waits for
        self._valid: dict[int, LiveGroup] = {}  # accepted, not taken; in order of acceptance
        self._wave: deque[int] = deque()  # deterministic mode: uids in the order of their verdicts
        self._samples: dict[int, LiveSample] = {}
        self._waiting: list[int] = []  # heap of sample ids; dropped ones are skipped
        self._touched: set[int] = set()  # replicas that may be able to continue answered samples
        self._out: dict[type, dict[int, list[int]]] = {}
        self._settled: list[Settled] = []
        self._generated = 0
        self._tally = Tally(COUNTS)

    # -- what the loop calls

    def begin_step(self, version: int, need: int) -> None:
        """Open the step that trains `need` groups on weights `version`; starts groups anew that max_lag forbids."""
        if need < 1 or version < self.version:
            raise ValueError(f"begin_step needs need >= 1 and a version of {self.version} or later: {version=} {need=}")
        self.version, self._need, self._closed, self._generated = version, need, False, 0
        fresh = math.floor(self._lead)
        tolerated = math.floor((self._lead - fresh) * need + 1e-9)  # a fractional max_lag's share of later groups
        for group in [*self._valid.values(), *sorted(self._open.values(), key=lambda group: group.uid)]:
            lag = version - group.version
            if lag == fresh + 1 and tolerated > 0:
                tolerated -= 1
            elif lag > fresh:
                self._requeue(group)
                self._tally.count("cancelled")

    def wants(self) -> int:
        """Fresh prompts the loop should offer before the next plan()."""
        return max(0, self._startable() - len(self._queue))

    def offer(self, uids: Iterable[int]) -> None:
        """Queue fresh prompts; uids rise over all calls."""
        for uid in uids:
            if uid <= self._newest_uid:
                raise ValueError(f"prompt {uid} comes after prompt {self._newest_uid}; uids must rise")
            self._newest_uid = uid
            heapq.heappush(self._queue, uid)

    def plan(self, events: Iterable[Event] = ()) -> list[Command]:
        """Take in events, return the commands that follow, Drops first.

        RolloutExhausted when the step can get no batch: no replica is left, or max_generated_groups is reached.
        """
        for event in events:
            self._observe(event)
        if self.config.deterministic:
            self._judge_in_order()
        if self._lead == 0 and self.ready():
            keep = {group.uid for group in self._pick()}
            for group in [*self._open.values(), *self._valid.values()]:
                if group.uid not in keep:
                    self._requeue(group)
        self._check_hope()
        self._start_groups()
        self._continue_answered()
        self._route()
        self._tally.record("in_flight/*", len(self._open))
        return self._commands()

    def ready(self) -> bool:
        """Whether take() would return a batch."""
        return not self._closed and len(self._pick()) == self._need

    def take(self) -> list[Group]:
        """The step's groups in order of uid; their prompts are settled as trained. Closes the step."""
        if not self.ready():
            raise ValueError(f"take() before ready(): {len(self._valid)} valid groups, {self._need} needed")
        picked = sorted(self._pick(), key=lambda group: group.uid)
        for group in picked:
            del self._valid[group.uid]
            self._settle(group, Disposition.TRAINED)
            self._tally.record("version_lag/*", self.version - group.version)
            self._tally.record("off_policy_ratio", float(self.version > group.version))
            for sample in group.samples:
                self._forget(sample)
                self._tally.record("kept_length", sample.done.num_tokens)
        self._closed = True
        return [group.frozen() for group in picked]

    def settled(self) -> list[Settled]:
        """Prompts that ended since the last call."""
        settled, self._settled = self._settled, []
        return settled

    def finished(self) -> list[Group]:
        """Accepted groups that wait to be taken."""
        return [group.frozen() for group in self._valid.values()]

    @property
    def in_flight(self) -> int:
        """Groups that were started and have no verdict."""
        return len(self._open)

    @property
    def budget(self) -> int:
        """Most groups that may be in flight or finished at once in this step."""
        return self._ahead + self.config.over_sampling

    def metrics(self) -> dict[str, tuple[float, float, float, float]]:
        """(sum, count, min, max) of what happened since the last call; hpcrl.stats.Stat(*value) takes them."""
        return self._tally.take("scheduler/")

    def exhausted(self, way_out: str) -> RolloutExhausted:
        """What to raise when the step can get no batch, with the counts."""
        names = ("filtered_mean_low", "filtered_mean_high", "filtered_std", "failed")
        counts = ", ".join(f"{name} {self._tally.counted(name)}" for name in names)
        last = [f", the last by {s.reason}" for s in self._settled if s.disposition is Disposition.FAILED][-1:]
        return RolloutExhausted(
            f"version {self.version}: {self._generated} groups were started and {len(self._open) + len(self._valid)} "
            f"of {self._need} can still come ({counts}{''.join(last)}): {way_out}"
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state: prompts to start (those in flight start anew, attempt + 1) and finished untrained groups."""
        tries = {uid: self._tries.get(uid, (0, 0)) for uid in self._queue}
        tries |= {group.uid: (group.attempt + 1, group.failures) for group in self._open.values()}
        return {
            "version": self.version,
            "newest_uid": self._newest_uid,
            "queue": [[uid, *tries[uid]] for uid in sorted(tries)],
            "finished": [group.saved() for group in self._valid.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a new scheduler. Finished samples whose replica is no more get a new home: see finished()."""
        assert self._newest_uid == -1, "load_state_dict is for a new scheduler"
        self.version, self._newest_uid = state["version"], state["newest_uid"]
        for uid, attempt, failures in state["queue"]:
            heapq.heappush(self._queue, uid)
            self._tries[uid] = (attempt, failures)
        for saved in state["finished"]:
            group = self._valid[saved["uid"]] = LiveGroup.restored(saved, list(self._replicas))
            for sample in group.samples:
                self._samples[sample.id] = sample
                self._replicas[sample.replica].samples.add(sample.id)

    # -- events

    def _observe(self, event: Event) -> None:
        match event:
            case BurstDone():
                self._burst_done(event)
            case Scored():
                self._scored(event)
            case Answered():
                for sample in self._live(event.sample_ids, State.RUNNING, State.ACTING):
                    if not self._early(sample, event):
                        self._move(sample, State.ANSWERED)
                        self._replicas[sample.replica].answered.append(sample.id)
            case Aborted():
                for _, length in event.lengths:
                    self._tally.record("aborted_length", length)
            case Failed():
                for sample in self._live(event.sample_ids, *State):
                    self._fail(sample.group, event.cause)
            case ScorerLost():
                for sample in self._live(event.sample_ids, State.SCORING):
                    self._emit(Rescore, sample)
            case ReplicaLost():
                self._replica_lost(event.replica)

    def _burst_done(self, event: BurstDone) -> None:
        ends = [(i, num_tokens, FinishReason(reason), State.SCORING) for i, num_tokens, reason in event.finished]
        ends += [(i, num_tokens, FinishReason.STOP, State.ACTING) for i, num_tokens in event.turns]
        for sample_id, num_tokens, reason, state in ends:
            for sample in self._live((sample_id,), State.RUNNING):
                self._move(sample, state)
                sample.done = DoneSample(sample_id, sample.replica, num_tokens, reason, 0.0, 0.0)
                if isinstance(sample.early, Scored):
                    self._scored(sample.early)
                elif sample.early is not None:
                    self._observe(Answered((sample_id,)))
                sample.early = None

    def _early(self, sample: LiveSample, event: Scored | Answered) -> bool:
        """Keep an answer that overtook the BurstDone it belongs to: they come from different ranks."""
        if sample.state is State.RUNNING:
            sample.early = event
        return sample.state is State.RUNNING

    def _scored(self, event: Scored) -> None:
        for sample in self._live((event.sample_id,), State.RUNNING, State.SCORING, State.ACTING):
            if self._early(sample, event):
                continue
            self._move(sample, State.DONE)
            reward, score, error = event.reward, event.score, event.error
            if not (math.isfinite(reward) and math.isfinite(score)):
                reward, score, error = 0.0, 0.0, error or f"reward {reward} and score {score} are not both finite"
            sample.done = replace(sample.done, reward=reward, score=score, error=error)
            self._tally.count("score_errors", bool(error))
            sample.group.pending -= 1
            if sample.group.pending == 0 and not self.config.deterministic:
                self._judge(sample.group)

    def _replica_lost(self, name: int) -> None:
        if name not in self._replicas:
            return
        samples = [self._samples[sample_id] for sample_id in sorted(self._replicas.pop(name).samples)]
        for sample in samples:
            self._forget(sample)
        for group in dict.fromkeys(sample.group for sample in samples):
            self._fail(group, f"generator replica {name} was lost")

    def _live(self, ids: Iterable[int], *states: State) -> Iterator[LiveSample]:
        """The samples among `ids` in one of these states; others, dropped or of another scheduler, are counted."""
        for sample_id in ids:
            sample = self._samples.get(sample_id)
            if sample is not None and sample.state in states:
                yield sample
            else:
                self._tally.count("stale")

    # -- verdicts

    def _fail(self, group: LiveGroup, cause: str) -> None:
        """The group has to start anew."""
        if group.uid in self._valid:
            self._requeue(group, cause)
        elif not group.cause:
            group.cause = cause
            if not self.config.deterministic:
                self._judge(group)

    def _judge_in_order(self) -> None:
        while self._wave and len(self._valid) < self._need:
            group = self._open.get(self._wave[0])
            if group is not None:
                if group.pending and not group.cause:
                    return
                self._judge(group)
            self._wave.popleft()

    def _judge(self, group: LiveGroup) -> None:
        if not (group.cause or self.config.accept_errors) and all(sample.done.error for sample in group.samples):
            group.cause = group.samples[0].done.error
        if group.cause:
            self._requeue(group, group.cause)
        elif reason := rejecting_filter([sample.done for sample in group.samples], self.config):
            self._tally.count("group_filter_count")
            self._tally.count(f"filtered_{reason}")
            self._release(group)
            self._settle(group, Disposition.FILTERED, reason)
        else:
            self._valid[group.uid] = self._open.pop(group.uid)
            self._overdue.discard(group.uid)

    def _requeue(self, group: LiveGroup, cause: str = "") -> None:
        """Drop the group; its prompt starts anew or, after max_attempts failures, has failed."""
        self._release(group)
        group.failures += bool(cause)
        if group.failures >= self.config.max_attempts:
            self._tally.count("failed")
            self._settle(group, Disposition.FAILED, cause)
        else:
            self._tries[group.uid] = (group.attempt + 1, group.failures)
            heapq.heappush(self._queue, group.uid)

    def _release(self, group: LiveGroup) -> None:
        """Forget the group and have the replicas forget it."""
        self._open.pop(group.uid, None)
        self._valid.pop(group.uid, None)
        self._overdue.discard(group.uid)
        for sample in group.samples:
            if sample.id in self._samples and sample.replica >= 0:
                self._emit(Drop, sample)
            self._forget(sample)

    def _settle(self, group: LiveGroup, disposition: Disposition, reason: str = "") -> None:
        scored = [] if disposition is Disposition.FAILED else group.samples
        rewards = tuple(sample.done.reward for sample in scored)
        self._settled.append(Settled(group.uid, group.attempt, disposition, reason, rewards))

    def _pick(self) -> list[LiveGroup]:
        """The `need` groups to train, those waited for first; none while the batch is not complete."""
        if self._overdue or len(self._valid) < self._need:
            return []
        return sorted(self._valid.values(), key=self._is_overdue, reverse=True)[: self._need]

    def _is_overdue(self, group: LiveGroup) -> bool:
        """Dropped so often, without its fault, that the batch waits for it; in order of uid it gets its turn anyway."""
        return not self.config.deterministic and group.attempt - group.failures >= self.config.max_attempts

    # -- starting and routing

    @property
    def _ahead(self) -> int:
        """Valid groups worth having: this step's and those that may be trained later."""
        return self._need + math.ceil(self._lead * self._need)

    def _startable(self) -> int:
        """Groups that may be started now."""
        if (self._closed and self._lead == 0) or len(self._valid) >= self._ahead:
            return 0
        if self.config.deterministic and self._open:
            return 0
        room = self.budget - len(self._open) - len(self._valid)
        return max(0, min(room, self._limit() - self._generated))

    def _limit(self) -> int:
        """Groups that may be started in one step."""
        return self.config.max_generated_groups or 20 * self._need

    def _check_hope(self) -> None:
        if not self._replicas:
            raise RolloutExhausted("no generator replica is left")
        if self._closed or len(self._open) + len(self._valid) >= self._need or self._generated < self._limit():
            return
        raise self.exhausted(f"relax rollout.filter_* or raise rollout.max_generated_groups ({self._limit()})")

    def _start_groups(self) -> None:
        started = [heapq.heappop(self._queue) for _ in range(min(self._startable(), len(self._queue)))]
        for uid in started:
            attempt, failures = self._tries.pop(uid, (0, 0))
            group = self._open[uid] = LiveGroup(uid, attempt, failures, self.version, self.config.group_size)
            if self._is_overdue(group):
                self._overdue.add(uid)
            for sample in group.samples:
                self._samples[sample.id] = sample
                heapq.heappush(self._waiting, sample.id)
        if started and self.config.deterministic:
            self._wave = deque(started)
        self._generated += len(started)
        self._tally.count("query_use_count", len(started))

    def _continue_answered(self) -> None:
        for name in sorted(self._touched):
            replica = self._replicas.get(name)
            if replica is None or not replica.answered:
                continue
            if self.config.deterministic:
                if replica.running or replica.acting:
                    continue
                replica.answered = deque(sorted(replica.answered))
            while replica.answered and (self.config.deterministic or replica.room > 0):
                sample = self._samples.get(replica.answered.popleft())
                if sample is not None:
                    self._move(sample, State.RUNNING)
                    self._emit(Continue, sample)
        self._touched.clear()

    def _route(self) -> None:
        """Give waiting samples to the replicas with the most room, siblings together where it suffices."""
        if self.config.deterministic:
            self._spread()
        while self._waiting:
            head = self._samples.get(self._waiting[0])
            if head is None:
                heapq.heappop(self._waiting)
                continue
            name = self._replicas.roomiest()
            room = self._replicas[name].room
            if room <= 0:
                return
            for _ in range(room if self.config.siblings_together else 1):
                self._admit(heapq.heappop(self._waiting), name)
                following = self._samples.get(self._waiting[0]) if self._waiting else None
                if following is None or following.group is not head.group:
                    break

    def _spread(self) -> None:
        """Give every waiting sample to a replica, in equal runs by sample id."""
        waiting = sorted(sample_id for sample_id in self._waiting if sample_id in self._samples)
        self._waiting.clear()
        names = list(self._replicas)
        for i, sample_id in enumerate(waiting):
            self._admit(sample_id, names[i * len(names) // len(waiting)])

    def _admit(self, sample_id: int, name: int) -> None:
        sample = self._samples[sample_id]
        sample.replica = name
        self._replicas[name].samples.add(sample_id)
        self._move(sample, State.RUNNING)
        self._emit(Admit, sample)

    # -- bookkeeping

    def _move(self, sample: LiveSample, state: State) -> None:
        """Change a sample's state and its replica's counts."""
        old, sample.state = sample.state, state
        if (replica := self._replicas.get(sample.replica)) is None:
            return
        replica.acting += (state is State.ACTING) - (old is State.ACTING)
        change = (state is State.RUNNING) - (old is State.RUNNING)
        if change:
            self._replicas.occupy(sample.replica, change)
        self._touched.add(sample.replica)

    def _forget(self, sample: LiveSample) -> None:
        if self._samples.pop(sample.id, None) is None:
            return
        if sample.state is not State.DONE:
            self._tally.count("aborted")
            self._move(sample, State.DONE)
        if sample.replica in self._replicas:
            self._replicas[sample.replica].samples.discard(sample.id)

    def _emit(self, kind: type, sample: LiveSample) -> None:
        self._out.setdefault(kind, {}).setdefault(sample.replica, []).append(sample.id)

    def _commands(self) -> list[Command]:
        """What was emitted since the last plan, without what later events of the same plan overtook."""
        out, self._out = self._out, {}
        return [
            kind(name, kept)
            for kind in (Drop, Rescore, Continue, Admit)
            for name, ids in sorted(out.get(kind, {}).items())
            if name in self._replicas and (kept := tuple(i for i in ids if (i in self._samples) != (kind is Drop)))
        ]
