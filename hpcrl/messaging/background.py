"""Work in rank 0's process while its controller waits for other ranks."""

from __future__ import annotations

from collections.abc import Callable

from hpcrl.messaging.messages import Event

Events = list[tuple[int, Event]]
"""(rank, event), in order."""


class Background:
    """The functions that parts register as rank 0's background work; these must never wait for another rank."""

    def __init__(self, run_local: Callable[[], bool] | None = None):
        """`run_local` runs pending commands of this process's roles and returns whether there were any; it is called
        whenever the controller waits. None if this process has no roles."""
        self._run_local = run_local
        self._listener: Callable[[Events], None] | None = None
        self._checks: list[Callable[[], None]] = []

    def on_events(self, listener: Callable[[Events], None]) -> None:
        """Register the only listener, which gets the events that arrive while the controller waits for answers.
        Without a listener, events are kept until Controller.events() returns them."""
        assert self._listener is None, "events can be taken once"
        self._listener = listener

    def check(self, check: Callable[[], None]) -> None:
        """Register a check, which is called whenever the controller waits for events."""
        self._checks.append(check)

    # -- called by the controller

    @property
    def has_local(self) -> bool:
        """Whether this process has roles."""
        return self._run_local is not None

    @property
    def has_listener(self) -> bool:
        return self._listener is not None

    def run_local(self) -> bool:
        """Run pending commands of this process's roles; returns whether there were any."""
        return self._run_local is not None and self._run_local()

    def deliver(self, events: Events) -> None:
        assert self._listener is not None
        self._listener(events)

    def run_checks(self) -> None:
        """Call all checks."""
        for check in self._checks:
            check()
