"""The rollout scheduler: which prompt is generated where, which groups make the batch, which are given up.

A pure state machine: no torch, no torch.distributed, no clock, no randomness. The loop feeds it events
(hpcrl.rollout.events) and carries out its commands:

    scheduler = RolloutScheduler(SchedulerConfig.of(config), replicas={replica: capacity, ...})
    scheduler.begin_step(version, need=config.rollout.num_prompts)
    while not scheduler.ready():
        scheduler.tell(events that arrived)                        # there may be none
        scheduler.offer(uids of scheduler.wants() fresh prompts)
        for command in scheduler.plan():
            push it to command.replica
    groups = scheduler.take()                                      # `need` groups in order of uid
                                                               # give_back() where they cannot be handed over
    ended = scheduler.settled()                                    # one Settled per prompt that ended
    stats = scheduler.metrics()                                    # name -> (sum, count, min, max), reset by the call

A prompt is known by its uid, a response by its sample id (hpcrl.rollout.types); the loop keeps prompts by uid until
they are settled. A sample is WAITING for room, RUNNING on a replica, SCORING, then DONE; one with an environment
alternates between RUNNING, ACTING (its environment has it, its slot is free) and ANSWERED (waiting for a slot of its
replica), and begins with its environment: it is ACTING before it has a token. After its episode it is DONE, or SCORING
where a reward is added.

Dropped samples leave the tables; what arrives about them later is counted as stale and ignored.

`capacity` is the number of requests a replica is given at once: its slots, plus as many as may wait there for the next
slot. Commands to one replica are carried out in the order given, so the room freed by a Drop is used by the Admit
behind it.

Default mode: samples go to the replica that carries least, siblings together where there is room; the first `need`
valid groups make the batch, and of each group the first group_size members. What else is in flight is dropped, its
prompts return to the head of the queue. Prompts dropped `max_attempts` times are waited for, once they fill a batch or
were dropped four times as often, so that long answers do not starve.
Deterministic mode: a wave of groups is spread over the replicas by sample id, all at once (engines queue what their
slots do not hold); the next wave starts when this one has ended; verdicts are passed in order of uid; the samples of a
replica take their next turn together. Commands and batches then follow from the samples' outcomes, never from the
order of events. Offer all that wants() asks for before plan().

Freshness (hpcrl.rollout.freshness): begin_step() starts groups anew that max_lag forbids. With on_stale=wait there are
none, but for redundant groups: a batch takes the oldest first and waits for those that no later one would have room
for in time. The count of groups on their way bounds nothing: whole batches overtake a long answer.
on_new_weights=restart starts samples anew that are on their way when weights arrive. Deterministic mode generates
nothing ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hpcrl.rollout.events import (
    ENV_LOST,
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
    Group,
    Paced,
    Played,
    ReplicaLost,
    Rescore,
    Scored,
    ScorerLost,
    Settled,
)
from hpcrl.rollout.freshness import Due, Freshness
from hpcrl.rollout.groups import LiveGroup, LiveSample, State, with_score
from hpcrl.rollout.outbox import Outbox
from hpcrl.rollout.policies import Lengths, SchedulerConfig, rejecting_filter
from hpcrl.rollout.prompt_queue import PromptQueue
from hpcrl.rollout.routing import Replicas, Waiting
from hpcrl.rollout.tally import Tally
from hpcrl.rollout.types import Disposition, FinishReason, split_sample_id

COUNTS = (
    "group_filter_count",
    "query_use_count",
    "aborted",
    "cancelled",
    "restarted",
    "redundant",
    "failed",
    "score_errors",
    "stale",
)


POISON = 3
"""Replicas or environments that may be lost under a prompt until it has failed: it may be what kills them."""
PATIENCE = 4
"""Times max_attempts that a prompt is dropped until the batch waits for it alone."""


class RolloutExhausted(ValueError):
    """The step can get no batch; the message has the counts."""


class RolloutScheduler:
    """See the module's docstring for its use."""

    def __init__(
        self, config: SchedulerConfig, replicas: Mapping[int, int], kind_of: Callable[[int], str] = lambda uid: ""
    ):
        """kind_of: class of a prompt (its domain); responses to prompts of one class are of about the same length."""
        self.config, self._kind_of = config, kind_of
        self.version = -1  # what the step trains
        self._newest = -1  # what replicas generate with
        self._fresh = Freshness(0.0 if config.deterministic else config.max_lag)
        self._replicas = Replicas(replicas)
        self._need = 0
        self._closed = True  # between take() and begin_step()
        self._queue = PromptQueue()
        self._open: dict[int, LiveGroup] = {}  # started, no verdict yet
        self._overdue: set[int] = set()  # of these, the ones the batch waits for since they were dropped too often
        self._due: list[Due] = []  # what this batch must take, lest something grow too old
        self._valid: dict[int, LiveGroup] = {}  # accepted, not taken; in order of acceptance
        self._taken: list[LiveGroup] = []  # by the last take()
        self._wave: deque[int] = deque()  # deterministic mode: uids in the order of their verdicts
        self._samples: dict[int, LiveSample] = {}
        self._waiting = Waiting(self._samples)
        self._homes: dict[int, int] = {}  # uid -> replica that has its prefix, of prompts that start anew
        self._lengths = Lengths()
        self._touched: set[int] = set()  # replicas that may be able to continue answered samples
        self._out = Outbox()
        self._settled: list[Settled] = []
        self._generated = 0  # groups that this step had or started
        self._before: dict[str, int] = {}  # counts when it was opened
        self._tally = Tally(COUNTS)

    # -- what the loop calls

    def begin_step(self, version: int, need: int) -> None:
        """Open the step that trains `need` groups on weights `version`, which have arrived; starts groups anew that
        max_lag forbids."""
        if need < 1 or version < self.version:
            raise ValueError(f"begin_step needs need >= 1 and a version of {self.version} or later: {version=} {need=}")
        self._tell_taken()
        self.version, self._need, self._closed = version, need, False
        self._generated, self._before = len(self._open) + len(self._valid), self._tally.counts()
        self.weights_arrived(version)
        for group in self._fresh.too_old(self._all_groups(), version, need):
            self._requeue(group)
            self._tally.count("cancelled")
        if self._fresh.max_lag > 0 and self.config.on_stale == "wait":
            self._due = self._fresh.due(self._all_groups(), self._open, version, need)

    def weights_arrived(self, version: int) -> None:
        """All replicas have weights `version`; what has not begun starts from them. As late as begin_step() will do."""
        if version <= self._newest:
            return
        self._newest = version
        for group in self._open.values():
            if self.config.on_new_weights == "restart":
                self._restart(group)
            if all(sample.state is State.WAITING for sample in group.samples):
                group.version = version

    def wants(self) -> int:
        """Fresh prompts the loop should offer before the next plan()."""
        return max(0, self._startable() - len(self._queue))

    def pause(self, replicas: frozenset[int]) -> None:
        """Admit and continue nothing on these until the next call, whose replicas take their place."""
        self._touched.update(self._replicas.pause(replicas))

    def offer(self, uids: Iterable[int]) -> None:
        """Queue fresh prompts; uids rise over all calls."""
        self._queue.offer(uids)

    def tell(self, events: Iterable[Event]) -> None:
        """Take in events. What wants() and ready() say may have changed then."""
        for event in events:
            self._observe(event)
        if self.config.deterministic:
            self._judge_in_order()

    def plan(self, events: Iterable[Event] = ()) -> list[Command]:
        """tell() the events, and return the commands that follow, Drops first.

        RolloutExhausted when the step can get no batch: too few replicas are left, or max_generated_groups is reached.
        """
        self.tell(events)
        if not self.generates_ahead and self.ready():
            keep = {group.uid for group in self._pick()}
            for group in [*self._open.values(), *self._valid.values()]:
                if group.uid not in keep:
                    self._requeue(group)
        self._check_hope()
        self._start_groups()
        self._continue_answered()
        self._route()
        self._tally.record("in_flight/*", len(self._open))
        self._tally.record("waiting/*", self._waiting.size)
        return self._out.take(self._replicas, self._samples)

    def ready(self) -> bool:
        """Whether take() would return a batch."""
        if self._closed or len(self._valid) < self._need or self._awaits_overdue():
            return False
        return all(due.is_met(self._need) for due in self._due)

    def take(self) -> list[Group]:
        """The step's groups in order of uid; their prompts are settled as trained. Closes the step."""
        if not self.ready():
            raise ValueError(f"take() before ready(): {len(self._valid)} valid groups, {self._need} needed")
        picked = sorted(self._pick(), key=lambda group: group.uid)
        if old := self._fresh.too_old(picked, self.version, self._need):
            raise AssertionError(f"the batch of version {self.version} would have groups of {old[0].version}: max_lag")
        self._taken = picked
        for group in picked:
            del self._valid[group.uid]
            self._settle(group, Disposition.TRAINED)
            for sample in group.samples:
                self._forget(sample)
        self._closed = True
        return [group.frozen() for group in picked]

    def give_back(self) -> None:
        """Undo take(), whose groups could not be handed over: those of a lost replica start anew, the others wait to be
        taken again. settled() and metrics() must not have been called since."""
        taken, self._taken = self._taken, []
        uids = {group.uid for group in taken}
        self._settled = [end for end in self._settled if end.uid not in uids]
        self._valid |= {group.uid: group for group in taken}
        self._closed = False
        for group in taken:
            self._samples |= {sample.id: sample for sample in group.samples}
            homes = {sample.replica for sample in group.samples}
            for name in homes & self._replicas.keys():
                self._replicas[name].samples |= {sample.id for sample in group.samples if sample.replica == name}
            if not homes <= self._replicas.keys():
                self._requeue(group, REPLICA_LOST)

    def settled(self) -> list[Settled]:
        """Prompts that ended since the last call."""
        settled, self._settled = self._settled, []
        return settled

    def finished(self) -> list[Group]:
        """Accepted groups that wait to be taken."""
        return [group.frozen() for group in self._valid.values()]

    @property
    def generates_ahead(self) -> bool:
        """Whether there may be work between two steps."""
        return self._fresh.max_lag > 0

    @property
    def in_flight(self) -> int:
        """Groups that were started and have no verdict."""
        return len(self._open)

    @property
    def budget(self) -> int:
        """Most groups that may be in flight or finished at once: this step's with the redundant ones, and those that
        may be trained later. Between two steps more of the old weights would only grow stale."""
        return self._ahead + (0 if self._closed else self.config.extra_prompts)

    def together(self, held: Iterable[int]) -> tuple[list[list[int]], list[int]]:
        """Of samples that await their siblings at a scorer: those of each group that has all it needs, and those that
        nobody wants any more."""
        groups: dict[int, list[LiveSample]] = {}
        unwanted = []
        for sample_id in held:
            sample = self._samples.get(sample_id)
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

    def metrics(self) -> dict[str, tuple[float, float, float, float]]:
        """(sum, count, min, max) of what happened since the last call; hpcrl.metrics.stats.Stat(*value) takes them."""
        self._tell_taken()
        self._before = {}
        return self._tally.take("scheduler/")

    def exhausted(self, way_out: str) -> RolloutExhausted:
        """What to raise when the step can get no batch, with the counts."""
        names = ("filtered_mean_low", "filtered_mean_high", "filtered_std", "failed")
        counts = ", ".join(f"{name} {self._tally.counted(name) - self._before.get(name, 0)}" for name in names)
        last = [f", the last by {s.reason}" for s in self._settled if s.disposition is Disposition.FAILED][-1:]
        return RolloutExhausted(
            f"version {self.version}: {self._generated} groups were started and {len(self._open) + len(self._valid)} "
            f"of {self._need} can still come ({counts}{''.join(last)}): {way_out}"
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state: prompts to start (those in flight start anew, attempt + 1), finished groups that wait to be
        taken, and ends that settled() has not told yet."""
        started = [[group.uid, group.attempt + 1, group.failures] for group in self._open.values()]
        return {
            "version": self.version,
            "newest_uid": self._queue.newest_uid,
            "queue": sorted(self._queue.saved() + started),
            "finished": [group.saved() for group in self._valid.values()],
            "settled": [end.saved() for end in self._settled],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a new scheduler. Finished samples whose replica is no more get a new home: see finished()."""
        self._queue.restore(state["newest_uid"], state["queue"])
        self.version = self._newest = state["version"]
        self._settled = [Settled.restored(saved) for saved in state.get("settled", [])]
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
            case Played():
                for sample in self._live((event.sample_id,), State.RUNNING, State.ACTING):
                    if not self._early(sample, event):
                        self._move(sample, State.SCORING)
                        sample.done = replace(sample.done, reward=event.reward, turn_rewards=event.turn_rewards)
                        self._out.put(Rescore, sample.replica, sample.id)
            case Answered():
                for sample in self._live(event.sample_ids, State.RUNNING, State.ACTING):
                    if not self._early(sample, event):
                        self._move(sample, State.ANSWERED)
                        self._replicas[sample.replica].answered.append(sample.id)
            case Aborted():
                for _, length in event.lengths:
                    if length:  # others were still waiting in the engine
                        self._tally.record("aborted_length", length)
            case Failed():
                for sample in self._live(event.sample_ids, *State):
                    self._give_up(sample, event.cause)
            case ScorerLost():
                for sample in self._live(event.sample_ids, State.SCORING):
                    self._out.put(Rescore, sample.replica, sample.id)
            case ReplicaLost():
                self._replica_lost(event.replica)
            case Paced():
                if event.replica in self._replicas and self.config.spare_slow_replicas:
                    self._replicas.tell_speed(event.replica, event.speed)

    def _burst_done(self, event: BurstDone) -> None:
        ends = [(i, num_tokens, FinishReason(reason), State.SCORING) for i, num_tokens, reason in event.finished]
        ends += [(i, num_tokens, FinishReason.STOP, State.ACTING) for i, num_tokens in event.turns]
        for sample_id, num_tokens, reason, state in ends:
            for sample in self._live((sample_id,), State.RUNNING):
                self._move(sample, state)
                sample.done = DoneSample(sample_id, sample.replica, num_tokens, reason, 0.0, 0.0)
                early, sample.early = sample.early, None
                if early is not None:
                    self._observe(early)

    def _early(self, sample: LiveSample, event: Scored | Answered | Played) -> bool:
        """Keep an answer that overtook the BurstDone it belongs to: they come from different ranks."""
        if sample.state is State.RUNNING:
            sample.early = event
        return sample.state is State.RUNNING

    def _scored(self, event: Scored) -> None:
        for sample in self._live((event.sample_id,), State.RUNNING, State.SCORING, State.ACTING):
            if self._early(sample, event):
                continue
            self._move(sample, State.DONE)
            sample.done = with_score(sample.done, event)
            self._tally.count("score_errors", bool(sample.done.error))
            self._lengths.learn(self._kind_of(sample.group.uid), sample.done.num_tokens)
            sample.group.num_done += 1
            if sample.group.num_done == sample.group.keep and not self.config.deterministic:
                self._judge(sample.group)

    def _replica_lost(self, name: int) -> None:
        if name not in self._replicas:
            return
        for sample_id in sorted(self._replicas.pop(name).samples):
            if (sample := self._samples.get(sample_id)) is not None:  # else its group was given up for a sibling
                self._give_up(sample, REPLICA_LOST)
                self._forget(sample)

    def _live(self, ids: Iterable[int], *states: State) -> Iterator[LiveSample]:
        """The samples among `ids` in one of these states; others, dropped or of another scheduler, are counted."""
        for sample_id in ids:
            sample = self._samples.get(sample_id)
            if sample is not None and sample.state in states:
                yield sample
            else:
                self._tally.count("stale")

    # -- verdicts

    def _give_up(self, sample: LiveSample, cause: str) -> None:
        """A sample cannot end. Its group does without it where it has members to spare, else it starts anew."""
        group = sample.group
        if group.uid in self._valid:
            self._requeue(group, cause)
        elif len(group.samples) > group.keep:
            group.samples.remove(sample)
            group.num_done -= sample.state is State.DONE
            self._abort(sample)
        elif not group.cause:
            group.cause = cause
            if self.config.deterministic:
                self._drop(sample)  # the turns of its siblings must not wait for it
            else:
                self._judge(group)

    def _judge_in_order(self) -> None:
        while self._wave and len(self._valid) < self._need:
            group = self._open.get(self._wave[0])
            if group is not None:
                if group.num_done < len(group.samples) and not group.cause:
                    return
                self._judge(group)
            self._wave.popleft()

    def _judge(self, group: LiveGroup) -> None:
        if not group.cause:
            for sample in group.surplus():
                group.samples.remove(sample)
                self._tally.count("redundant")
                self._abort(sample)
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
            for due in self._due:
                due.open.discard(group.uid)

    def _requeue(self, group: LiveGroup, cause: str = "") -> None:
        """Drop the group; its prompt starts anew or, after max_attempts failures, has failed."""
        home = group.samples[0].replica
        for sample in group.samples:
            self._abort(sample)
        self._release(group)
        group.failures += bool(cause)
        blameless = cause in (REPLICA_LOST, ENV_LOST)
        allowed = max(self.config.max_attempts, POISON) if blameless else self.config.max_attempts
        if group.failures >= allowed:
            self._tally.count("failed")
            self._settle(group, Disposition.FAILED, cause)
        else:
            self._queue.put_back(group.uid, group.attempt + 1, group.failures)
            self._generated = max(0, self._generated - 1)
            if home in self._replicas and self.config.prompt_affinity:
                self._homes[group.uid] = home

    def _restart(self, group: LiveGroup) -> None:
        """Start the samples anew that are on their way, each max_attempts times at most."""
        for sample in list(group.samples):
            going = sample.state in (State.RUNNING, State.ACTING, State.ANSWERED)
            if not going or split_sample_id(sample.id)[1] >= self.config.max_attempts:
                continue
            fresh = group.restart(sample)
            if self.config.prompt_affinity:
                self._homes[group.uid] = sample.replica
            self._abort(sample)
            self._tally.count("restarted")
            self._samples[fresh.id] = fresh
            self._waiting.add(fresh)

    def _release(self, group: LiveGroup) -> None:
        """Forget the group and have the replicas forget it."""
        self._open.pop(group.uid, None)
        self._valid.pop(group.uid, None)
        self._overdue.discard(group.uid)
        for due in self._due:
            due.uids.discard(group.uid)
            due.open.discard(group.uid)
        for sample in group.samples:
            self._drop(sample)

    def _abort(self, sample: LiveSample) -> None:
        """Drop a sample whose tokens were in vain; one that decodes is counted by its replica."""
        if sample.id in self._samples and sample.state not in (State.WAITING, State.RUNNING):
            self._tally.record("aborted_length", sample.done.num_tokens)
        self._drop(sample)

    def _drop(self, sample: LiveSample) -> None:
        """Forget the sample and have its replica forget it."""
        if sample.id in self._samples and sample.replica >= 0:
            self._out.put(Drop, sample.replica, sample.id)
        self._forget(sample)

    def _settle(self, group: LiveGroup, disposition: Disposition, reason: str = "") -> None:
        self._homes.pop(group.uid, None)
        scored = [] if disposition is Disposition.FAILED else group.samples
        rewards = tuple(sample.done.reward for sample in scored)
        self._settled.append(Settled(group.uid, group.attempt, disposition, reason, rewards))

    def _pick(self) -> list[LiveGroup]:
        """The `need` groups to train: the oldest, as many as are due; then those that were dropped too often, the most
        often dropped first; then the oldest again."""
        oldest = sorted(self._valid.values(), key=lambda group: group.version)
        due = max((due.count for due in self._due), default=0)
        others = sorted(oldest[due:], key=lambda group: -self._dropped(group) if self._is_overdue(group) else 0)
        return (oldest[:due] + others)[: self._need]

    def _all_groups(self) -> list[LiveGroup]:
        """Those that wait to be taken, then those on their way, in order of uid."""
        return [*self._valid.values(), *sorted(self._open.values(), key=lambda group: group.uid)]

    def _awaits_overdue(self) -> bool:
        """Whether a group on its way was dropped too often. To wait for one alone makes every step as long as the
        longest answer, so they gather until they fill a batch, or one of them was dropped far too often."""
        if not self._overdue:
            return False
        overdue = [*(self._open[uid] for uid in self._overdue), *filter(self._is_overdue, self._valid.values())]
        patience = PATIENCE * self.config.max_attempts
        return len(overdue) >= self._need or any(self._dropped(group) >= patience for group in overdue)

    def _is_overdue(self, group: LiveGroup) -> bool:
        """Dropped so often that the batch waits for it; in order of uid it gets its turn anyway."""
        return not self.config.deterministic and self._dropped(group) >= self.config.max_attempts

    @staticmethod
    def _dropped(group: LiveGroup) -> int:
        """Times the prompt was dropped without its fault."""
        return group.attempt - group.failures

    # -- starting and routing

    @property
    def _ahead(self) -> int:
        """Valid groups worth having: this step's and those that may be trained later."""
        return self._fresh.ahead(self._need) + (0 if self._closed else self._need)

    def _startable(self) -> int:
        """Groups that may be started now."""
        if len(self._valid) >= self._ahead:
            return 0
        if self.config.deterministic and self._open:
            return 0
        room = self.budget - len(self._open) - len(self._valid)
        return max(0, min(room, self._limit() - self._generated))

    def _limit(self) -> int:
        """Groups that may be started in one step."""
        return self.config.max_generated_groups or 20 * self._need

    def _check_hope(self) -> None:
        if len(self._replicas) < max(1, self.config.min_replicas):
            raise RolloutExhausted(
                f"{len(self._replicas)} generator replicas are left, rollout.min_replicas={self.config.min_replicas}"
            )
        if self._closed or len(self._open) + len(self._valid) >= self._need or self._generated < self._limit():
            return
        raise self.exhausted(f"relax rollout.filter_* or raise rollout.max_generated_groups ({self._limit()})")

    def _start_groups(self) -> None:
        started = [self._queue.pop() for _ in range(min(self._startable(), len(self._queue)))]
        for uid, attempt, failures in started:
            group = self._open[uid] = LiveGroup(
                uid, attempt, failures, self._newest, self.config.num_members, self.config.group_size
            )
            if self._is_overdue(group):
                self._overdue.add(uid)
            for sample in group.samples:
                self._samples[sample.id] = sample
                self._waiting.add(sample)
        if started and self.config.deterministic:
            self._wave = deque(uid for uid, _, _ in started)
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
                    self._out.put(Continue, sample.replica, sample.id)
        self._touched.clear()

    def _route(self) -> None:
        """Give waiting samples to replicas."""
        if self.config.deterministic:
            routes = self._waiting.spread(self._replicas)
        else:
            routes = self._waiting.route(self._replicas, together=self.config.siblings_together, home=self._home)
        for sample, name in routes:
            if sample.group.uid in self._homes:
                self._tally.record("prefix_kept", float(self._homes[sample.group.uid] == name))
            if self.config.routing == "expected_length" and not self.config.deterministic:
                sample.weight = self._lengths.expected(self._kind_of(sample.group.uid))
            sample.replica = name
            self._replicas[name].samples.add(sample.id)
            self._move(sample, State.RUNNING)
            self._out.put(Admit, name, sample.id)

    def _home(self, sample: LiveSample) -> int | None:
        """The replica that a prompt should go to."""
        return self._homes.get(sample.group.uid)

    # -- bookkeeping

    def _tell_taken(self) -> None:
        """Count the last batch, which is not given back any more."""
        for group in self._taken:
            self._tally.record("version_lag/*", self.version - group.version)
            self._tally.record("off_policy_ratio", float(self.version > group.version))
            self._tally.record("replicas_per_group", len({sample.replica for sample in group.samples}))
            for sample in group.samples:
                self._tally.record("kept_length", sample.done.num_tokens)
                if self._dropped(group):
                    self._tally.record("kept_length_retried", sample.done.num_tokens)
        if self._taken:
            self._tell_spread()
        self._taken = []

    def _tell_spread(self) -> None:
        """How the last batch was spread over the replicas."""
        tokens = dict.fromkeys(self._replicas, 0)
        for group in self._taken:
            for sample in group.samples:
                tokens[sample.replica] = tokens.get(sample.replica, 0) + sample.done.num_tokens
        for count in tokens.values():
            self._tally.record("replica_tokens/*", count)
        for replica in self._replicas.values():
            self._tally.record("replica_speed/*", replica.speed)

    def _move(self, sample: LiveSample, state: State) -> None:
        """Change a sample's state and its replica's counts."""
        old, sample.state = sample.state, state
        if (replica := self._replicas.get(sample.replica)) is None:
            return
        replica.acting += (state is State.ACTING) - (old is State.ACTING)
        change = (state is State.RUNNING) - (old is State.RUNNING)
        if change:
            self._replicas.occupy(sample.replica, change, sample.weight)
        self._touched.add(sample.replica)

    def _forget(self, sample: LiveSample) -> None:
        if self._samples.pop(sample.id, None) is None:
            return
        if sample.state is State.WAITING:
            self._waiting.size -= 1
        if sample.state is not State.DONE:
            self._tally.count("aborted")
            self._move(sample, State.DONE)
        if sample.replica in self._replicas:
            self._replicas[sample.replica].samples.discard(sample.id)
