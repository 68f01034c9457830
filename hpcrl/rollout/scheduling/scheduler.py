"""The rollout scheduler: which replica generates which prompt, which groups form the batch, and which are dropped.

The scheduler is a pure state machine: no torch, no clock, no randomness. The rollout loop passes it events
(hpcrl.rollout.scheduling.events) and executes its commands:

    scheduler = RolloutScheduler(SchedulerConfig.of(config), replicas={replica: capacity, ...})
    scheduler.begin_step(version, need=config.rollout.num_prompts)
    while not scheduler.ready():
        scheduler.handle_events(events that arrived)
        scheduler.add_prompts(uids of scheduler.num_wanted() fresh prompts)
        for command in scheduler.plan():
            send it to command.replica
    groups = scheduler.take_batch()    # `need` groups in order of uid; return_batch() if they cannot be transferred
    ended = scheduler.ended_prompts()  # one EndedPrompt per prompt that ended
    stats = scheduler.metrics()        # name -> (sum, count, min, max) since the last call

Prompts are identified by uid, responses by sample id (hpcrl.rollout.types).

`capacity` is the number of requests a replica gets at once: its slots, plus the requests that may wait there for the
next free slot. A replica must execute its commands in order: a Generate uses the room that the Drop before it frees.

This file manages a group: its start, verdict (valid, filtered, restarted or failed), taking and dropping. Other files:

    samples.py     states of samples, load of replicas, commands to replicas
    modes.py       StreamingMode, DeterministicMode: when groups start, where samples run, when verdicts are given
    selection.py   which groups form the batch, and for which groups it waits; staleness.py: max_staleness
    accounts.py    how prompts ended, and the step's metrics
    policies.py    settings and filters

With max_staleness=0, groups in flight are dropped when the batch is ready, and their prompts return to the head of the
queue. With on_new_weights=restart, unfinished samples restart when weights arrive. In deterministic mode, add all
prompts that num_wanted() asks for before plan().
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hpcrl.rollout.scheduling.accounts import Accounts
from hpcrl.rollout.scheduling.events import (
    ENV_LOST,
    REPLICA_LOST,
    EndedPrompt,
    Group,
    SchedulerCommand,
    SchedulerEvent,
)
from hpcrl.rollout.scheduling.groups import LiveGroup, LiveSample, PromptQueue, State
from hpcrl.rollout.scheduling.modes import DeterministicMode, Mode, StreamingMode
from hpcrl.rollout.scheduling.policies import SchedulerConfig, rejecting_filter
from hpcrl.rollout.scheduling.samples import Samples
from hpcrl.rollout.scheduling.selection import Selection
from hpcrl.rollout.types import PromptOutcome, split_sample_id

POISON = 3
"""A prompt fails after the loss of this many (or max_attempts, if larger) replicas or env ranks that worked on it,
since the prompt may be the cause."""


class RolloutExhausted(ValueError):
    """The step can no longer get a batch; the message contains the counts."""


class RolloutScheduler:
    """The module's docstring shows its use."""

    def __init__(
        self, config: SchedulerConfig, replicas: Mapping[int, int], kind_of: Callable[[int], str] = lambda uid: ""
    ):
        """`replicas` maps each replica to its capacity. `kind_of` returns the class of a prompt (its domain, which may
        have its own filters), as in modes.StreamingMode."""
        self.config, self._kind_of = config, kind_of
        self._newest = -1  # weight version on the replicas
        self._accounts = Accounts()
        self._tally = self._accounts.tally
        self._samples = Samples(replicas, self._tally, config.speed_aware_routing)
        self._mode: Mode = DeterministicMode() if config.deterministic else StreamingMode(config, kind_of)
        self._selection = Selection(config)
        self._queue = PromptQueue()
        self._open: dict[int, LiveGroup] = {}  # started, no verdict yet
        self._generated = 0  # groups in flight or valid at the start of the step, and groups started since

    # -- steps

    @property
    def version(self) -> int:
        """The version that the step trains; -1 before the first step."""
        return self._selection.version

    def begin_step(self, version: int, need: int) -> None:
        """Open the step that trains weights `version`, which the replicas have, on `need` groups. Restarts groups that
        exceed max_staleness."""
        if need < 1 or version < self.version:
            raise ValueError(f"begin_step needs need >= 1 and a version of {self.version} or later: {version=} {need=}")
        self._accounts.open_step(self._samples.replicas)
        self._selection.open(version, need)
        self._generated = len(self._open) + len(self._selection.valid)
        self.weights_arrived(version)
        for group in self._selection.too_stale(self._open):
            self._requeue(group)
            self._tally.count("cancelled")
        self._selection.find_due(self._open)

    def weights_arrived(self, version: int) -> None:
        """Record that all replicas have weights `version`; a group of which no sample has started gets this version.
        begin_step() calls this too."""
        if version <= self._newest:
            return
        self._newest = version
        for group in self._open.values():
            if self.config.on_new_weights == "restart":
                self._restart(group)
            if all(sample.state is State.WAITING for sample in group.everyone):
                group.version = version

    def ready(self) -> bool:
        """Whether take_batch() would return a batch."""
        return self._selection.is_ready()

    def take_batch(self) -> list[Group]:
        """Close the step; returns its groups in order of uid. Their prompts end as trained. ValueError if not ready."""
        batch = self._selection.take_batch()
        self._accounts.take_batch(batch, self.version)
        for group in batch:
            for sample in group.samples:
                self._samples.forget(sample)
        return [group.frozen() for group in batch]

    def return_batch(self) -> None:
        """Undo take_batch() because its groups could not be transferred: groups of a lost replica restart, all others
        wait to be taken again. Call it before ended_prompts() and metrics()."""
        taken = self._accounts.return_batch()
        self._selection.return_batch(taken)
        for group in taken:
            group.home = None  # the home was for the previous attempt
            for sample in group.samples:
                self._samples.restore(sample)
            if any(sample.replica not in self._samples.replicas for sample in group.samples):
                self._requeue(group, REPLICA_LOST)

    # -- events and commands

    def num_wanted(self) -> int:
        """Number of fresh prompts to offer before the next plan()."""
        return max(0, self._startable() - len(self._queue))

    def add_prompts(self, uids: Iterable[int]) -> None:
        """Queue fresh prompts; uids must increase over all calls."""
        self._queue.add_prompts(uids)

    def pause(self, replicas: frozenset[int]) -> None:
        """Assign no new work to these replicas, and resume all others, until the next call."""
        self._samples.pause(replicas)

    def handle_events(self, events: Iterable[SchedulerEvent]) -> None:
        """Apply events, which may change num_wanted() and ready()."""
        for event in events:
            for sample, cause in self._samples.observe(event):
                if cause:
                    self._give_up(sample, cause)
                else:
                    self._done(sample)
        while not self._selection.is_full and (group := self._mode.next_decided(self._open)) is not None:
            self._decide(group)

    def plan(self, events: Iterable[SchedulerEvent] = ()) -> list[SchedulerCommand]:
        """Apply the events and return the new commands, Drops first.

        RolloutExhausted if no batch is possible: too few replicas are left, or max_generated_groups is reached.
        """
        self.handle_events(events)
        if not self.generates_ahead and self.ready():
            keep = {group.uid for group in self._selection.pick()}
            for group in [*self._open.values(), *self._selection.valid.values()]:
                if group.uid not in keep:
                    self._requeue(group)
        self._require_possible_batch()
        self._start_groups()
        self._samples.continue_answered(self._mode.turns)
        for sample, replica in self._mode.route(self._samples.waiting, self._samples.replicas):
            if sample.group.home is not None:
                self._tally.record("prefix_kept", float(sample.group.home == replica))
            self._samples.admit(sample, replica)
        self._tally.record("in_flight/*", len(self._open))
        self._tally.record("waiting/*", self._samples.waiting.size)
        return self._samples.commands()

    def complete_groups(self, held: Iterable[int]) -> tuple[list[list[int]], list[int]]:
        """Split the samples that a scorer holds for group scoring: (complete groups, samples no longer needed). All
        other `held` samples still wait for their group."""
        return self._samples.complete_groups(held)

    # -- state

    def ended_prompts(self) -> list[EndedPrompt]:
        """Prompts that ended since the last call."""
        return self._accounts.ended_prompts()

    def lost(self) -> list[int]:
        """Prompts that ended without being trained since the last call. Each must be replaced by another prompt."""
        return self._accounts.lost()

    def metrics(self) -> dict[str, tuple[float, float, float, float]]:
        """(sum, count, min, max) by name since the last call, as for hpcrl.metrics.stats.Stat."""
        return self._accounts.metrics(self._samples.replicas)

    def finished(self) -> list[Group]:
        """Valid groups that wait to be taken."""
        return [group.frozen() for group in self._selection.valid.values()]

    def started(self) -> list[tuple[int, int, int]]:
        """(uid, number of done samples, number of samples) of the groups without a verdict."""
        return [(group.uid, group.num_done, len(group.samples)) for group in self._open.values()]

    @property
    def generates_ahead(self) -> bool:
        """Whether replicas may generate between two steps."""
        return self._selection.generates_ahead

    @property
    def budget(self) -> int:
        """Maximum number of groups in flight or valid at once: this step's groups with extra_prompts, and groups that
        may be trained later. Between two steps there are no extra prompts: their groups would only become stale."""
        return self._selection.worth_having + (0 if self._selection.is_closed else self.config.extra_prompts)

    @property
    def limit(self) -> int:
        """Maximum number of groups in one step: carried over from the previous step or started in it; dropped groups
        that will restart do not count."""
        return self.config.max_generated_groups or 20 * self._selection.need

    def exhausted(self, remedy: str) -> RolloutExhausted:
        """The exception for a step that can no longer get a batch. `remedy` is advice for the user."""
        return RolloutExhausted(
            f"version {self.version}: {self._generated} groups were started and "
            f"{len(self._open) + len(self._selection.valid)} of {self._selection.need} needed groups can still be "
            f"completed ({self._accounts.losses()}): {remedy}"
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state: prompts to start (prompts in flight with attempt + 1), valid groups that wait to be taken,
        and ended prompts that ended_prompts() has not returned yet."""
        started = [[group.uid, group.attempt + 1, group.failures] for group in self._open.values()]
        return {
            "version": self.version,
            "newest_uid": self._queue.newest_uid,
            "queue": sorted(self._queue.saved() + started),
            "finished": [group.saved() for group in self._selection.valid.values()],
            "ended_prompts": self._accounts.saved(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state into a new scheduler. Samples of a replica that no longer exists are assigned to
        another replica, which finished() shows."""
        self._queue.restore(state["newest_uid"], state["queue"])
        self._selection.version = self._newest = state["version"]
        self._accounts.restore(state["ended_prompts"] if "ended_prompts" in state else state.get("settled", []))
        for saved in state["finished"]:
            group = LiveGroup.restored(saved, list(self._samples.replicas))
            self._selection.accept(group)
            for sample in group.samples:
                self._samples.restore(sample)

    # -- the start of groups

    def _startable(self) -> int:
        """Number of groups that may be started now."""
        num_valid = len(self._selection.valid)
        if num_valid >= self._selection.worth_having or not self._mode.may_start(len(self._open)):
            return 0
        return max(0, min(self.budget - len(self._open) - num_valid, self.limit - self._generated))

    def _require_possible_batch(self) -> None:
        """RolloutExhausted if the step can no longer get a batch."""
        replicas, selection = self._samples.replicas, self._selection
        if len(replicas) < max(1, self.config.min_replicas):
            raise RolloutExhausted(
                f"{len(replicas)} generator replicas are left, rollout.min_replicas={self.config.min_replicas}"
            )
        may_come = len(self._open) + len(selection.valid)
        if not selection.is_closed and may_come < selection.need and self._generated >= self.limit:
            raise self.exhausted(self._accounts.remedy(self.limit))

    def _start_groups(self) -> None:
        starts = [self._queue.pop() for _ in range(min(self._startable(), len(self._queue)))]
        for start in starts:
            config = self.config
            group = LiveGroup(start, self._newest, config.num_members, config.group_size, config.greedy_baseline)
            self._open[group.uid] = group
            self._selection.expect(group)
            for sample in group.everyone:
                self._samples.add(sample)
        self._mode.started([start.uid for start in starts])
        self._generated += len(starts)
        self._tally.count("query_use_count", len(starts))

    # -- verdicts

    def _done(self, sample: LiveSample) -> None:
        group = sample.group
        if sample.done.failed and self.config.restart_failed_episodes and self._may_restart(sample):
            group.num_done -= sample is not group.greedy
            self._replace(sample)
            return
        self._mode.observe(sample)
        if group.num_done >= group.keep and group.is_greedy_done and self._mode.decides_at_once:
            self._decide(group)

    def _give_up(self, sample: LiveSample, cause: str) -> None:
        """Handle a sample that cannot end: if its group has spare members, the group continues without the sample;
        otherwise the group restarts, or fails after max_attempts."""
        group = sample.group
        if group.uid in self._selection.valid:
            self._requeue(group, cause)
        elif len(group.samples) > group.keep and sample is not group.greedy:
            group.samples.remove(sample)
            group.num_done -= sample.state is State.DONE
            self._samples.abort(sample)
        elif not group.cause:
            group.cause = cause
            if self._mode.decides_at_once:
                self._decide(group)
            else:
                self._samples.drop(sample)  # otherwise the group members' next turns would wait for it

    def _decide(self, group: LiveGroup) -> None:
        if not group.cause:
            for sample in group.surplus():
                group.samples.remove(sample)
                self._tally.count("redundant")
                self._samples.abort(sample)
        if not (group.cause or self.config.accept_errors) and all(sample.done.error for sample in group.samples):
            group.cause = group.samples[0].done.error
        if group.greedy is not None and group.greedy.done.failed:
            group.cause = group.greedy.done.error  # else its reward would be the baseline
        if group.cause:
            self._requeue(group, group.cause)
            return
        if group.greedy is not None:
            group.baseline = group.greedy.done.reward
            self._samples.drop(group.greedy)
            group.greedy = None
        if reason := self._filter_of(group):
            self._tally.count("group_filter_count")
            self._tally.count(f"filtered_{reason}")
            self._release(group)
            self._accounts.close_prompt(group, PromptOutcome.FILTERED, reason)
        else:
            self._selection.accept(self._open.pop(group.uid))

    def _filter_of(self, group: LiveGroup) -> str:
        """Name of the filter that rejects the group, empty if none does."""
        domain = self._kind_of(group.uid)
        samples = [sample.done for sample in group.samples]
        return rejecting_filter(samples, self.config.of_domain(domain), group.baseline, domain)

    def _requeue(self, group: LiveGroup, cause: str = "") -> None:
        """Drop the group. Its prompt restarts, or fails after max_attempts failures."""
        home = group.samples[0].replica
        for sample in group.everyone:
            self._samples.abort(sample)
        self._release(group)
        group.failures += bool(cause)
        blameless = cause in (REPLICA_LOST, ENV_LOST)
        allowed = max(self.config.max_attempts, POISON) if blameless else self.config.max_attempts
        if group.failures >= allowed:
            self._tally.count("failed")
            self._accounts.close_prompt(group, PromptOutcome.FAILED, cause)
            return
        if home in self._samples.replicas and self.config.prompt_affinity:
            group.home = home
        self._queue.put_back(group.next_start())
        self._generated = max(0, self._generated - 1)

    def _restart(self, group: LiveGroup) -> None:
        """Restart the unfinished samples that have begun, each at most max_attempts times."""
        for sample in list(group.everyone):
            if sample.state in (State.RUNNING, State.ACTING, State.ANSWERED) and self._may_restart(sample):
                self._replace(sample)

    def _may_restart(self, sample: LiveSample) -> bool:
        return split_sample_id(sample.id)[1] < self.config.max_attempts

    def _replace(self, sample: LiveSample) -> None:
        """Restart the sample."""
        fresh = sample.group.restart(sample)
        if self.config.prompt_affinity:
            sample.group.home = sample.replica
        self._samples.abort(sample)
        self._tally.count("restarted")
        self._samples.add(fresh)

    def _release(self, group: LiveGroup) -> None:
        """Forget the group, also on its replicas."""
        self._open.pop(group.uid, None)
        self._selection.remove(group)
        for sample in group.everyone:
            self._samples.drop(sample)
