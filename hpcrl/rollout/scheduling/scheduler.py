"""The rollout scheduler: which prompt is generated where, which groups make the batch, which are given up.

A pure state machine: no torch, no torch.distributed, no clock, no randomness. The loop feeds it events
(hpcrl.rollout.scheduling.events) and carries out its commands:

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
they are settled.

`capacity` is the number of requests a replica is given at once: its slots, plus as many as may wait there for the next
slot. Commands to one replica are carried out in the order given, so the room freed by a Drop is used by the Admit
behind it.

This file has the life of a group: it is started, gets its verdict (valid, filtered, to be started anew, failed), and is
taken or dropped. The rest is one idea a file:

    samples.py     the states of samples, what the replicas carry and are told to do
    modes.py       when work starts, where it goes and when verdicts are passed: by flow, or deterministic in waves
    selection.py   which groups make the batch, and which it waits for; freshness.py: max_lag
    accounts.py    how prompts ended, and the step's counts and values
    policies.py    the settings, and the filters

Beyond what the batch takes nothing goes on without max_lag: what is in flight when it is ready is dropped, and its
prompts return to the head of the queue. on_new_weights=restart starts samples anew that are on their way when weights
arrive. Deterministic mode generates nothing ahead; offer all that wants() asks for before plan().
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hpcrl.rollout.scheduling.accounts import Accounts
from hpcrl.rollout.scheduling.events import ENV_LOST, REPLICA_LOST, Command, Event, Group, Settled
from hpcrl.rollout.scheduling.groups import LiveGroup, LiveSample, State
from hpcrl.rollout.scheduling.modes import Flow, Mode, Wave
from hpcrl.rollout.scheduling.policies import SchedulerConfig, rejecting_filter
from hpcrl.rollout.scheduling.prompt_queue import PromptQueue
from hpcrl.rollout.scheduling.samples import Samples
from hpcrl.rollout.scheduling.selection import Selection
from hpcrl.rollout.types import Disposition, split_sample_id

POISON = 3
"""Replicas or environments that may be lost under a prompt until it has failed: it may be what kills them."""


class RolloutExhausted(ValueError):
    """The step can get no batch; the message has the counts."""


class RolloutScheduler:
    """See the module's docstring for its use."""

    def __init__(
        self, config: SchedulerConfig, replicas: Mapping[int, int], kind_of: Callable[[int], str] = lambda uid: ""
    ):
        """kind_of: class of a prompt (its domain); responses to prompts of one class are of about the same length."""
        self.config = config
        self._newest = -1  # what replicas generate with
        self._accounts = Accounts()
        self._tally = self._accounts.tally
        self._samples = Samples(replicas, self._tally, config.spare_slow_replicas)
        self._mode: Mode = Wave() if config.deterministic else Flow(config, kind_of)
        self._selection = Selection(config)
        self._queue = PromptQueue()
        self._open: dict[int, LiveGroup] = {}  # started, no verdict yet
        self._generated = 0  # groups that this step had or started

    # -- steps

    @property
    def version(self) -> int:
        """What the step trains; -1 before the first."""
        return self._selection.version

    def begin_step(self, version: int, need: int) -> None:
        """Open the step that trains `need` groups on weights `version`, which have arrived; starts groups anew that
        max_lag forbids."""
        if need < 1 or version < self.version:
            raise ValueError(f"begin_step needs need >= 1 and a version of {self.version} or later: {version=} {need=}")
        self._accounts.open_step(self._samples.replicas)
        self._selection.open(version, need)
        self._generated = len(self._open) + len(self._selection.valid)
        self.weights_arrived(version)
        for group in self._selection.too_old(self._open):
            self._requeue(group)
            self._tally.count("cancelled")
        self._selection.find_due(self._open)

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

    def ready(self) -> bool:
        """Whether take() would return a batch."""
        return self._selection.is_ready()

    def take(self) -> list[Group]:
        """The step's groups in order of uid; their prompts are settled as trained. Closes the step."""
        batch = self._selection.take()
        self._accounts.take(batch, self.version)
        for group in batch:
            for sample in group.samples:
                self._samples.forget(sample)
        return [group.frozen() for group in batch]

    def give_back(self) -> None:
        """Undo take(), whose groups could not be handed over: those of a lost replica start anew, the others wait to be
        taken again. settled() and metrics() must not have been called since."""
        taken = self._accounts.give_back()
        self._selection.give_back(taken)
        for group in taken:
            group.home = None  # that was for the attempt which is done
            for sample in group.samples:
                self._samples.restore(sample)
            if any(sample.replica not in self._samples.replicas for sample in group.samples):
                self._requeue(group, REPLICA_LOST)

    # -- what happens, and what follows

    def wants(self) -> int:
        """Fresh prompts the loop should offer before the next plan()."""
        return max(0, self._startable() - len(self._queue))

    def offer(self, uids: Iterable[int]) -> None:
        """Queue fresh prompts; uids rise over all calls."""
        self._queue.offer(uids)

    def pause(self, replicas: frozenset[int]) -> None:
        """Admit and continue nothing on these until the next call, whose replicas take their place."""
        self._samples.pause(replicas)

    def tell(self, events: Iterable[Event]) -> None:
        """Take in events. What wants() and ready() say may have changed then."""
        for event in events:
            for sample, cause in self._samples.observe(event):
                if cause:
                    self._give_up(sample, cause)
                else:
                    self._done(sample)
        while not self._selection.is_full and (group := self._mode.next_verdict(self._open)) is not None:
            self._judge(group)

    def plan(self, events: Iterable[Event] = ()) -> list[Command]:
        """tell() the events, and return the commands that follow, Drops first.

        RolloutExhausted when the step can get no batch: too few replicas are left, or max_generated_groups is reached.
        """
        self.tell(events)
        if not self.generates_ahead and self.ready():
            keep = {group.uid for group in self._selection.pick()}
            for group in [*self._open.values(), *self._selection.valid.values()]:
                if group.uid not in keep:
                    self._requeue(group)
        self._check_hope()
        self._start_groups()
        self._samples.continue_answered(self._mode.turns)
        for sample, replica in self._mode.route(self._samples.waiting, self._samples.replicas):
            if sample.group.home is not None:
                self._tally.record("prefix_kept", float(sample.group.home == replica))
            self._samples.admit(sample, replica)
        self._tally.record("in_flight/*", len(self._open))
        self._tally.record("waiting/*", self._samples.waiting.size)
        return self._samples.commands()

    def together(self, held: Iterable[int]) -> tuple[list[list[int]], list[int]]:
        """Of samples that await their siblings at a scorer: those of each group that has all it needs, and those that
        nobody wants any more."""
        return self._samples.together(held)

    # -- how it stands

    def settled(self) -> list[Settled]:
        """Prompts that ended since the last call."""
        return self._accounts.settled()

    def metrics(self) -> dict[str, tuple[float, float, float, float]]:
        """(sum, count, min, max) of what happened since the last call; hpcrl.metrics.stats.Stat(*value) takes them."""
        return self._accounts.metrics(self._samples.replicas)

    def finished(self) -> list[Group]:
        """Accepted groups that wait to be taken."""
        return [group.frozen() for group in self._selection.valid.values()]

    @property
    def generates_ahead(self) -> bool:
        """Whether there may be work between two steps."""
        return self._selection.generates_ahead

    @property
    def in_flight(self) -> int:
        """Groups that were started and have no verdict."""
        return len(self._open)

    @property
    def budget(self) -> int:
        """Most groups that may be in flight or finished at once: this step's with the redundant ones, and those that
        may be trained later. Between two steps more of the old weights would only grow stale."""
        return self._selection.worth_having + (0 if self._selection.is_closed else self.config.extra_prompts)

    @property
    def limit(self) -> int:
        """Groups that may be started in one step."""
        return self.config.max_generated_groups or 20 * self._selection.need

    def exhausted(self, way_out: str) -> RolloutExhausted:
        """What to raise when the step can get no batch, with the counts."""
        return RolloutExhausted(
            f"version {self.version}: {self._generated} groups were started and "
            f"{len(self._open) + len(self._selection.valid)} of {self._selection.need} can still come "
            f"({self._accounts.losses()}): {way_out}"
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state: prompts to start (those in flight start anew, attempt + 1), finished groups that wait to be
        taken, and ends that settled() has not told yet."""
        started = [[group.uid, group.attempt + 1, group.failures] for group in self._open.values()]
        return {
            "version": self.version,
            "newest_uid": self._queue.newest_uid,
            "queue": sorted(self._queue.saved() + started),
            "finished": [group.saved() for group in self._selection.valid.values()],
            "settled": self._accounts.saved(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a new scheduler. Finished samples whose replica is no more get a new home: see finished()."""
        self._queue.restore(state["newest_uid"], state["queue"])
        self._selection.version = self._newest = state["version"]
        self._accounts.restore(state.get("settled", []))
        for saved in state["finished"]:
            group = LiveGroup.restored(saved, list(self._samples.replicas))
            self._selection.accept(group)
            for sample in group.samples:
                self._samples.restore(sample)

    # -- the start of groups

    def _startable(self) -> int:
        """Groups that may be started now."""
        num_valid = len(self._selection.valid)
        if num_valid >= self._selection.worth_having or not self._mode.may_start(len(self._open)):
            return 0
        return max(0, min(self.budget - len(self._open) - num_valid, self.limit - self._generated))

    def _check_hope(self) -> None:
        replicas, selection = self._samples.replicas, self._selection
        if len(replicas) < max(1, self.config.min_replicas):
            raise RolloutExhausted(
                f"{len(replicas)} generator replicas are left, rollout.min_replicas={self.config.min_replicas}"
            )
        may_come = len(self._open) + len(selection.valid)
        if not selection.is_closed and may_come < selection.need and self._generated >= self.limit:
            raise self.exhausted(f"relax rollout.filter_* or raise rollout.max_generated_groups ({self.limit})")

    def _start_groups(self) -> None:
        starts = [self._queue.pop() for _ in range(min(self._startable(), len(self._queue)))]
        for start in starts:
            group = LiveGroup(start, self._newest, self.config.num_members, self.config.group_size)
            self._open[group.uid] = group
            self._selection.expect(group)
            for sample in group.samples:
                self._samples.add(sample)
        self._mode.started([start.uid for start in starts])
        self._generated += len(starts)
        self._tally.count("query_use_count", len(starts))

    # -- verdicts

    def _done(self, sample: LiveSample) -> None:
        self._mode.learn(sample)
        group = sample.group
        if group.num_done == group.keep and self._mode.judges_at_once:
            self._judge(group)

    def _give_up(self, sample: LiveSample, cause: str) -> None:
        """A sample cannot end. Its group does without it where it has members to spare, else it starts anew."""
        group = sample.group
        if group.uid in self._selection.valid:
            self._requeue(group, cause)
        elif len(group.samples) > group.keep:
            group.samples.remove(sample)
            group.num_done -= sample.state is State.DONE
            self._samples.abort(sample)
        elif not group.cause:
            group.cause = cause
            if self._mode.judges_at_once:
                self._judge(group)
            else:
                self._samples.drop(sample)  # the turns of its siblings must not wait for it

    def _judge(self, group: LiveGroup) -> None:
        if not group.cause:
            for sample in group.surplus():
                group.samples.remove(sample)
                self._tally.count("redundant")
                self._samples.abort(sample)
        if not (group.cause or self.config.accept_errors) and all(sample.done.error for sample in group.samples):
            group.cause = group.samples[0].done.error
        if group.cause:
            self._requeue(group, group.cause)
        elif reason := rejecting_filter([sample.done for sample in group.samples], self.config):
            self._tally.count("group_filter_count")
            self._tally.count(f"filtered_{reason}")
            self._release(group)
            self._accounts.settle(group, Disposition.FILTERED, reason)
        else:
            self._selection.accept(self._open.pop(group.uid))

    def _requeue(self, group: LiveGroup, cause: str = "") -> None:
        """Drop the group; its prompt starts anew or, after max_attempts failures, has failed."""
        home = group.samples[0].replica
        for sample in group.samples:
            self._samples.abort(sample)
        self._release(group)
        group.failures += bool(cause)
        blameless = cause in (REPLICA_LOST, ENV_LOST)
        allowed = max(self.config.max_attempts, POISON) if blameless else self.config.max_attempts
        if group.failures >= allowed:
            self._tally.count("failed")
            self._accounts.settle(group, Disposition.FAILED, cause)
            return
        if home in self._samples.replicas and self.config.prompt_affinity:
            group.home = home
        self._queue.put_back(group.next_start())
        self._generated = max(0, self._generated - 1)

    def _restart(self, group: LiveGroup) -> None:
        """Start the samples anew that are on their way, each max_attempts times at most."""
        for sample in list(group.samples):
            going = sample.state in (State.RUNNING, State.ACTING, State.ANSWERED)
            if not going or split_sample_id(sample.id)[1] >= self.config.max_attempts:
                continue
            fresh = group.restart(sample)
            if self.config.prompt_affinity:
                group.home = sample.replica
            self._samples.abort(sample)
            self._tally.count("restarted")
            self._samples.add(fresh)

    def _release(self, group: LiveGroup) -> None:
        """Forget the group and have the replicas forget it."""
        self._open.pop(group.uid, None)
        self._selection.remove(group)
        for sample in group.samples:
            self._samples.drop(sample)
