"""Rank 0's side of the control plane: send commands in one total order, wait for answers, judge the silent."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from hpcrl.dist.messages import ONE_WAY, BurstDone, Command, Done, Event, Failed, Joined, Leave, Lost
from hpcrl.dist.world import World, rank_queue

CHECK_EVERY_S = 1.0


class RankFailed(RuntimeError):
    """A rank raised or died; the message names rank, role, command and cause."""


class RankSilent(RuntimeError):
    """A rank did not answer within the deadline; the message names rank, role, command and seconds."""


@dataclass(frozen=True)
class _Outstanding:
    name: str
    since: float


class Controller:
    """Pushes commands and collects answers. `pump` runs commands of roles that live in this process."""

    def __init__(
        self,
        world: World,
        roles_of: Callable[[int], Collection[str]],
        *,
        command_s: float,
        start_s: float,
        survivable: Callable[[int, Collection[int]], bool],
    ):
        assert world.events is not None
        self._world, self._inbox, self._roles_of = world, world.events, roles_of
        self.command_s, self._start_s, self._survivable = command_s, start_s, survivable
        self._outstanding: dict[tuple[int, int], _Outstanding] = {}
        self._events: deque[tuple[int, Event]] = deque()
        self._answers: dict[tuple[int, int], Done] = {}
        self._hosts: dict[int, str] = {}
        self.lost: set[int] = set()
        self.pump: Callable[[], bool] | None = None

    def describe(self, rank: int) -> str:
        """How errors name a rank."""
        roles = ", ".join(self._roles_of(rank)) or "no role"
        return f"rank {rank} ({roles}) on {self._hosts.get(rank, 'an unknown host')}"

    def await_world(self) -> None:
        """Wait until every rank has joined. RankSilent names those that have not within start_s."""
        deadline = time.monotonic() + self._start_s
        while len(self._hosts) < self._world.size:
            self._take(min(CHECK_EVERY_S, max(0.0, deadline - time.monotonic())))
            if time.monotonic() > deadline:
                missing = sorted(set(range(self._world.size)) - set(self._hosts))
                raise RankSilent(f"ranks {missing} did not join the world within {self._start_s:g} s")

    def send(self, rank: int, command: Command) -> int:
        """Push a command that needs no answer waited for here; returns its number. A lost rank gets nothing (-1)."""
        if rank in self.lost:
            return -1
        seq = self._world.sender.send(rank_queue(rank), command)
        if not isinstance(command, ONE_WAY):
            self._outstanding[rank, seq] = _Outstanding(type(command).__name__, time.monotonic())
        return seq

    def call(self, commands: Mapping[int, Command]) -> dict[int, Done]:
        """Push one command per rank, wait for all answers. RankFailed or RankSilent says which rank and why not.

        All of them are pushed before anything else is, so every collective among them sees the same order everywhere.
        """
        self._world.trace.enter("call " + ", ".join(sorted({type(c).__name__ for c in commands.values()})))
        waiting = {(rank, self.send(rank, command)) for rank, command in commands.items() if rank not in self.lost}
        while any(key not in self._answers for key in waiting if key[0] not in self.lost):
            self._take(CHECK_EVERY_S)
        return {rank: self._answers.pop((rank, seq)) for rank, seq in waiting if (rank, seq) in self._answers}

    def events(self, timeout_s: float) -> list[tuple[int, Event]]:
        """Events other than answers to call(), as (rank, event), in order; waits up to timeout_s for the first."""
        self._world.trace.enter("wait for events")
        if not self._events:
            self._take(timeout_s)
        while self._take(0.0):
            pass
        events = list(self._events)
        self._events.clear()
        return events

    def give_up(self, rank: int, cause: str, silent_s: float) -> None:
        """Treat a rank that does not answer as lost; RankSilent where the run cannot go on without it."""
        if not self._survivable(rank, self.lost | {rank}):
            raise RankSilent(f"{self.describe(rank)} did not answer within {silent_s:.0f} s: {cause}")
        self._lose(Lost(rank, f"no answer for {silent_s:.0f} s: {cause}"))

    def dismiss(self) -> None:
        """Tell every other rank to leave and wait for their answers: the store lives here, so this rank leaves last."""
        self.call({rank: Leave() for rank in range(self._world.size) if rank != self._world.rank})

    def _take(self, timeout_s: float) -> bool:
        """Handle one message if there is one within timeout_s, running local commands meanwhile."""
        if self.pump is not None and self.pump():
            timeout_s = 0.0
        message = self._inbox.get(timeout_s)
        self._check_deadlines()
        if message is None:
            return False
        sender, _, event = message
        match event:
            case Joined():
                self._hosts[sender] = event.host
            case Done():
                if self._outstanding.pop((sender, event.seq), None) is not None:
                    self._answers[sender, event.seq] = event
            case BurstDone():
                self._outstanding.pop((sender, event.seq), None)
                self._events.append((sender, event))
            case Failed():
                raise RankFailed(
                    f"{self.describe(sender)} failed in command {event.command} #{event.seq}: {event.error}"
                )
            case Lost():
                self._lose(event)
            case _:
                self._events.append((sender, event))
        return True

    def _lose(self, event: Lost) -> None:
        if event.rank in self.lost:
            return
        doing = [f"{o.name} #{seq}" for (rank, seq), o in self._outstanding.items() if rank == event.rank]
        text = f"{self.describe(event.rank)} is lost: {event.cause}" + (f" (unanswered: {doing[0]})" if doing else "")
        if not self._survivable(event.rank, self.lost | {event.rank}):
            raise RankFailed(text)
        self.lost.add(event.rank)
        self._outstanding = {key: o for key, o in self._outstanding.items() if key[0] != event.rank}
        self._events.append((event.rank, event))
        print(f"hpcrl: {text}; the run goes on without it", flush=True)

    def _check_deadlines(self) -> None:
        if not self._outstanding:
            return
        now = time.monotonic()
        late = [(k, o) for k, o in self._outstanding.items() if now - o.since > self.command_s]
        if not late:
            return
        # A rank works in order, so its oldest command is the one it is stuck in; waiting for a peer looks the same.
        first: dict[int, tuple[int, _Outstanding]] = {}
        for (rank, seq), outstanding in sorted(late, key=lambda item: item[0]):
            first.setdefault(rank, (seq, outstanding))
        parts = [
            f"{self.describe(r)} in command {o.name} #{seq} for {now - o.since:.0f} s" for r, (seq, o) in first.items()
        ]
        raise RankSilent(f"no answer within {self.command_s:g} s: " + "; ".join(parts))
