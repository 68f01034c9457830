"""Rank 0's side of the control plane: send commands in a total order, wait for answers, handle silent ranks."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from hpcrl.messaging.background import Background, Events
from hpcrl.messaging.mailbox_server import SenderEnded
from hpcrl.messaging.messages import (
    ONE_WAY,
    Command,
    DecodeChunk,
    DecodeChunkDone,
    Done,
    Event,
    Failed,
    Joined,
    Lost,
    Observed,
    Scored,
    Shutdown,
)
from hpcrl.messaging.queues import ReaderLost
from hpcrl.messaging.trace import UnansweredCommand
from hpcrl.messaging.world import World, rank_queue
from hpcrl.system.clock import AwakeClock
from hpcrl.timeline.recorder import Recorder

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 10.0  # while no message arrives
CHECKS_PER_DEADLINE = 8
LOCAL_EVERY_S = 0.002  # between two polls of the commands for this process's roles
MAX_TAKEN = 1024  # messages read before events are returned; in a large world messages never stop
CAUSE_S = 15.0  # an agent polls once a second and needs seconds to import torch before its first report


class RankFailed(RuntimeError):
    """A command raised on a rank. `event` is the rank's report."""

    def __init__(self, message: str, event: Failed):
        super().__init__(message)
        self.event = event


class RankLost(RuntimeError):
    """A rank's process ended."""


class RankSilent(RuntimeError):
    """A rank did not answer within the deadline. As with the errors above, the message names rank, role and command."""


@dataclass(frozen=True)
class _Outstanding:
    name: str
    since: float
    allowed_s: float
    awaited: bool  # finish() returns this answer; otherwise only its arrival is recorded


@dataclass(frozen=True)
class _Unreached:
    since: float
    why: str
    closed: bool = False  # the rank closed its connection: its process has ended


Started = list[tuple[int, int]]
"""(rank, number) of commands whose answers are awaited."""


class Controller:
    """Pushes commands and collects answers. `background` is work that this process does while it waits; `timeline`
    records what the ranks do."""

    def __init__(
        self,
        world: World,
        roles_of: Callable[[int], Collection[str]],
        *,
        command_s: float,
        start_s: float,
        survivable: Callable[[int, Collection[int]], bool],
        background: Background | None = None,
        timeline: Recorder | None = None,
    ):
        assert world.events is not None
        self._world, self._inbox, self._roles_of = world, world.events, roles_of
        self.command_s, self._start_s, self._survivable = command_s, start_s, survivable
        self._background, self.timeline = background or Background(), timeline
        self._clock = AwakeClock(command_s)
        self.check_s = min(CHECK_EVERY_S, command_s / CHECKS_PER_DEADLINE)
        self._outstanding: dict[tuple[int, int], _Outstanding] = {}
        self._next_check = 0.0
        self._events: deque[tuple[int, Event]] = deque()
        self._answers: dict[tuple[int, int], Done] = {}
        self._answered: dict[int, float] = {}  # rank -> time of its last answer, when its current command began
        self._hosts: dict[int, str] = {}
        self._unreached: dict[int, _Unreached] = {}
        self._left: set[int] = set()
        self.lost: set[int] = set()
        self.built = False  # until then no rank may be lost: other ranks may wait for it to join a group

    def _can_lose(self, rank: int) -> bool:
        return self.built and self._survivable(rank, self.lost | {rank})

    def describe(self, rank: int) -> str:
        """A rank's name in errors."""
        roles = ", ".join(self._roles_of(rank)) or "no role"
        return f"rank {rank} ({roles})" + (f" on {self._hosts[rank]}" if rank in self._hosts else "")

    def await_world(self) -> None:
        """Wait until every rank has joined. RankSilent names the ranks that have not joined within start_s."""
        clock = AwakeClock(self._start_s)
        while len(self._hosts) < self._world.size:
            self._take(min(self.check_s, self._start_s / CHECKS_PER_DEADLINE))
            if clock.now() > self._start_s:
                missing = [self.describe(rank) for rank in range(self._world.size) if rank not in self._hosts]
                raise RankSilent(f"did not join the world within {self._start_s:g} s: {', '.join(missing)}")

    def send(self, rank: int, command: Command) -> int:
        """Push a command without waiting for an answer; return its number, or -1 for a lost rank."""
        return self._push(rank, command, self.command_s, awaited=False)

    def _push(self, rank: int, command: Command, allowed_s: float, awaited: bool) -> int:
        if rank in self.lost:
            return -1
        name, sent_at = type(command).__name__, time.monotonic()
        try:
            seq = self._world.sender.send(rank_queue(rank), command)
        except ReaderLost as lost:
            seq = lost.seq
            self._unreached.setdefault(rank, _Unreached(self._clock.now(), str(lost)))
        if self.timeline is not None:
            self.timeline.sent(rank, seq, name, sent_at)
        if not isinstance(command, ONE_WAY):
            self._outstanding[rank, seq] = _Outstanding(name, self._clock.now(), allowed_s, awaited)
        return seq

    def call(self, commands: Mapping[int, Command], more_s: float = 0.0) -> dict[int, Done]:
        """Push one command per rank and wait for all answers, at most command_s + more_s. RankFailed, RankLost or
        RankSilent name the ranks that did not answer."""
        return self.finish(self.start(commands, more_s))

    def start(self, commands: Mapping[int, Command], more_s: float = 0.0) -> Started:
        """Push one command per rank; finish() must follow. Several calls may be started first: ranks work in order.

        All commands of a call are pushed before any other command, so all ranks see their collectives in one order.
        """
        self._world.trace.enter("call " + ", ".join(sorted({type(c).__name__ for c in commands.values()})))
        allowed_s = self.command_s + more_s
        return [(r, self._push(r, c, allowed_s, awaited=True)) for r, c in commands.items() if r not in self.lost]

    def finish(self, started: Started) -> dict[int, Done]:
        """Wait for the answers to the commands of start(); errors as in call()."""
        began = time.monotonic()
        awaited = next((self._outstanding[key] for key in started if key in self._outstanding), None)
        try:
            for key in started:
                while key not in self._answers and key[0] not in self.lost:
                    self._take(self.check_s)
                    if self._background.has_listener and self._events:
                        self._background.deliver(self._taken())
        finally:
            if self.timeline is not None and awaited is not None:
                self.timeline.waited(awaited.name, began)
        return {rank: self._answers.pop((rank, seq)) for rank, seq in started if (rank, seq) in self._answers}

    def answered(self, started: Started) -> bool:
        """Whether finish() would not wait."""
        return all(key in self._answers or key[0] in self.lost for key in started)

    def events(self) -> Events:
        """Some events other than answers to call(), as (rank, event), in order; waits up to check_s for one."""
        self._background.run_checks()
        self._world.trace.enter("wait for events")
        if not self._events:
            self._take(self.check_s)
        for _ in range(MAX_TAKEN):
            if not self._take(0.0):
                break
        return self._taken()

    def _taken(self) -> Events:
        events = list(self._events)
        self._events.clear()
        return events

    def declare_lost(self, rank: int, cause: str, silent_s: float) -> None:
        """Treat a rank that does not answer as lost; RankSilent if the run cannot continue without it."""
        if not self._can_lose(rank):
            raise RankSilent(f"{self.describe(rank)} did not answer within {silent_s:.0f} s: {cause}")
        self._lose(Lost(rank, f"no answer for {silent_s:.0f} s: {cause}"))

    def drop_ranks(self, ranks: Collection[int], cause: str) -> None:
        """Wait for the agents' reports about these ranks, which other ranks could not reach, then continue without
        them. Errors as in declare_lost() if the run needs one of them."""
        deadline = self._clock.now() + min(CAUSE_S, self.command_s)
        while not self.lost.issuperset(ranks) and self._clock.now() < deadline:
            self._take(min(self.check_s, 1.0))
        for rank in ranks:
            self._lose(Lost(rank, cause, silent=True))

    def unanswered(self) -> list[UnansweredCommand]:
        """Of every rank that owes an answer, the oldest command, in which it is or waits for a peer."""
        now, found = self._clock.now(), dict[int, UnansweredCommand]()
        for (rank, seq), one in sorted(self._outstanding.items(), key=lambda item: item[0]):
            found.setdefault(rank, UnansweredCommand(rank, one.name, seq, now - self._begun(rank, one)))
        return list(found.values())

    def _begun(self, rank: int, outstanding: _Outstanding) -> float:
        """When a rank began a command at the earliest: it works in order."""
        return max(outstanding.since, self._answered.get(rank, 0.0))

    def shut_down(self) -> None:
        """Send Shutdown to every other rank and wait for the answers. This rank hosts the store, so it exits last."""
        self.call({rank: Shutdown() for rank in range(self._world.size) if rank != self._world.rank})

    def _take(self, timeout_s: float) -> bool:
        """Handle one message if there is one within timeout_s, running local commands meanwhile."""
        if self._background.has_local:
            timeout_s = 0.0 if self._background.run_local() else min(timeout_s, LOCAL_EVERY_S)
        message = self._inbox.get(timeout_s)
        for ended in self._inbox.take_ended():
            self._end_of(ended)
        self._check_deadlines()
        if message is None:
            return False
        sender, _, event = message
        if sender in self.lost:  # it was treated as lost before, and answers again
            return True
        if self.timeline is not None:
            self._record(self.timeline, sender, event)
        match event:
            case Joined():
                self._hosts[sender] = event.host
            case Done():
                self._answered[sender] = self._clock.now()
                answered = self._outstanding.pop((sender, event.seq), None)
                if answered is not None and answered.name == Shutdown.__name__:
                    self._left.add(sender)
                if answered is not None and answered.awaited:
                    self._answers[sender, event.seq] = event
            case DecodeChunkDone():
                self._answered[sender] = self._clock.now()
                self._outstanding.pop((sender, event.seq), None)
                self._events.append((sender, event))
            case Failed() if self._is_own(event) and self._can_lose(sender):
                self._lose(Lost(sender, f"failed in {event.command}: {event.error}"))
            case Failed():
                raise self._cause_of(sender, event)
            case Lost():
                self._lose(event)
            case _:
                self._events.append((sender, event))
        return True

    @staticmethod
    def _record(timeline: Recorder, rank: int, event: Event) -> None:
        match event:
            case Joined():
                timeline.joined(rank, event.host)
            case DecodeChunkDone():
                timeline.executed(rank, event.spans, (event.seq, event.tokens, event.running, event.queued))
            case Done() | Scored() | Observed():
                timeline.executed(rank, event.spans)

    def _end_of(self, ended: SenderEnded) -> None:
        """Handle a sender from which nothing more arrives, or that accepts nothing. A rank whose process has ended, or
        that accepts nothing, is lost when its agent reports the cause, or after CAUSE_S."""
        rank = ended.sender
        if rank in self._left or rank in self.lost or not 0 < rank < self._world.size:  # agents end after their ranks
            return
        if ended.how in ("closed", "unreached"):
            before = self._unreached.get(rank, _Unreached(self._clock.now(), ended.why))
            self._unreached[rank] = replace(before, closed=before.closed or ended.how == "closed")
        else:
            self._lose(Lost(rank, ended.why))

    @staticmethod
    def _is_own(event: Failed) -> bool:
        """Whether the cause is neither the rank's input nor a peer, so other ranks of its role may succeed."""
        return not event.seq or (event.command == DecodeChunk.__name__ and event.kind == "")

    def _cause_of(self, sender: int, event: Failed) -> RankFailed | RankLost | RankSilent:
        """The error to raise for a failure. If the failure is a broken connection to a peer, wait for a report from the
        peer or its agent; without one, a peer whose process has ended is the cause."""
        first = self._failure(sender, event)
        deadline = self._clock.now() + min(CAUSE_S, self.command_s)
        failed = {sender}
        while event.kind == "peer" and self._clock.now() < deadline:
            message = self._inbox.get(max(0.0, deadline - self._clock.now()))
            for ended in self._inbox.take_ended():
                self._end_of(ended)
            match message:
                case (_, _, Lost() as lost) if lost.rank not in failed:
                    if not self._can_lose(lost.rank):
                        return self._loss(lost)
                case (other, _, Failed() as failure):
                    failed.add(other)
                    if failure.kind != "peer":
                        return self._failure(other, failure)
        for rank, unreached in self._unreached.items() if event.kind == "peer" else ():
            if unreached.closed and rank not in failed and not self._can_lose(rank):
                return self._loss(Lost(rank, unreached.why))
        return first

    def _failure(self, rank: int, event: Failed) -> RankFailed:
        where = f"command {event.command} #{event.seq}" if event.seq else event.command
        text = f"{self.describe(rank)} failed in {where}: {event.error}"
        return RankFailed(text, event)

    def _loss(self, event: Lost) -> RankLost | RankSilent:
        doing = [f"{o.name} #{seq}" for (rank, seq), o in self._outstanding.items() if rank == event.rank]
        text = f"{self.describe(event.rank)} is lost: {event.cause}" + (f" (unanswered: {doing[0]})" if doing else "")
        return RankSilent(text) if event.silent else RankLost(text)

    def _lose(self, event: Lost) -> None:
        if event.rank in self.lost or not 0 <= event.rank < self._world.size:
            return
        loss = self._loss(event)
        if not self._can_lose(event.rank):
            raise loss
        self.lost.add(event.rank)
        self._world.tell_lost(self.lost)
        self._outstanding = {key: o for key, o in self._outstanding.items() if key[0] != event.rank}
        self._events.append((event.rank, event))
        logger.warning("%s; the run continues without it", loss)

    def _lose_late(self, rank: int) -> bool:
        """Continue without a rank that did not answer in time, if possible."""
        if not self._can_lose(rank):
            return False
        self._lose(Lost(rank, "it did not answer in time", silent=True))
        return True

    def _check_deadlines(self) -> None:
        """Once per check_s: RankSilent if an answer that the run needs is overdue, or a rank that it needs accepts no
        messages and no agent reports the cause (RankLost if its process has ended)."""
        now = self._clock.now()
        if not (self._outstanding or self._unreached) or now < self._next_check:
            return
        self._next_check = now + self.check_s
        for rank, unreached in list(self._unreached.items()):
            if now - unreached.since > min(CAUSE_S, self.command_s):
                del self._unreached[rank]
                self._lose(Lost(rank, unreached.why, silent=not unreached.closed))
        self._world.trace.report_progress()
        begun = {key: self._begun(key[0], o) for key, o in self._outstanding.items()}
        late = [(key, o) for key, o in self._outstanding.items() if now - begun[key] > o.allowed_s]
        if not late:
            return
        if lost := [rank for rank in sorted({rank for (rank, _), _ in late}) if self._lose_late(rank)]:
            # Other late ranks may only have waited for the ranks that are now lost.
            self._outstanding |= {key: replace(o, since=now) for key, o in late if key[0] not in lost}
            return
        # A rank works in order, so it is stuck in its oldest command, or waits for a peer in it.
        first: dict[int, tuple[int, _Outstanding]] = {}
        for (rank, seq), outstanding in sorted(late, key=lambda item: item[0]):
            first.setdefault(rank, (seq, outstanding))
        parts = [
            f"{self.describe(r)} in command {o.name} #{seq} for {now - begun[r, seq]:.0f} s"
            for r, (seq, o) in first.items()
        ]
        allowed_s = max(o.allowed_s for _, o in first.values())
        raise RankSilent(f"no answer within {allowed_s:g} s: " + "; ".join(parts))
