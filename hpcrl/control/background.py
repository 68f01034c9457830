"""What goes on in the process of rank 0 while its controller waits for other ranks."""

from __future__ import annotations

from collections.abc import Callable

from hpcrl.control.messages import Event

Events = list[tuple[int, Event]]
"""(rank, what it said), in order."""


class Background:
    """Handed in where the controller is made; who builds a part that works in the background adds it.

    None of the work may wait for another rank: the controller does that."""

    def __init__(self, run_local: Callable[[], bool] | None = None):
        """run_local: runs commands of the roles that live in this process; whether there were any. None where no role
        does. It is called whenever the controller waits."""
        self._run_local = run_local
        self._listener: Callable[[Events], None] | None = None
        self._checks: list[Callable[[], None]] = []

    def listen(self, listener: Callable[[Events], None]) -> None:
        """While answers are waited for, the listener gets the events that come meanwhile. There is one at most; without
        it events stay where they are until they are asked for."""
        assert self._listener is None, "events can be taken once"
        self._listener = listener

    def check(self, check: Callable[[], None]) -> None:
        """Whenever events are waited for, `check` looks after work under way."""
        self._checks.append(check)

    # -- what the controller calls

    @property
    def has_local(self) -> bool:
        """Whether roles live in this process."""
        return self._run_local is not None

    @property
    def listens(self) -> bool:
        """Whether somebody takes events while answers are waited for."""
        return self._listener is not None

    def run_local(self) -> bool:
        """Run commands of roles in this process; whether there were any."""
        return self._run_local is not None and self._run_local()

    def hear(self, events: Events) -> None:
        """Give the listener what came."""
        assert self._listener is not None
        self._listener(events)

    def look(self) -> None:
        """Look after all work under way."""
        for check in self._checks:
            check()
