"""Wait for several queues at once, without polling."""

from __future__ import annotations

import queue
import threading
from typing import Any

from hpcrl.control.queues import ControlError, Inbox

WAIT_S = 60.0


class Listener:
    """Takes messages from an inbox, which only the listener may use from now on. Its thread blocks in the store.

    `news` is set after every message, so that the owner of `news` can wait for several listeners.
    """

    def __init__(self, inbox: Inbox, news: threading.Event):
        self._messages: queue.SimpleQueue[tuple[int, int, Any] | ControlError] = queue.SimpleQueue()
        arguments = (inbox, self._messages, news)
        threading.Thread(target=_listen, args=arguments, name=f"listen to {inbox.name}", daemon=True).start()

    def get(self, timeout_s: float = 0.0) -> tuple[int, int, Any] | None:
        """Like Inbox.get."""
        try:
            message = self._messages.get(timeout_s > 0, timeout_s)
        except queue.Empty:
            return None
        if isinstance(message, ControlError):
            self._messages.put(message)  # nothing will follow
            raise message
        return message


def _listen(inbox: Inbox, messages: queue.SimpleQueue, news: threading.Event) -> None:
    """Holds no reference to the listener, so that an unused listener can be freed."""
    message: Any = None
    while not isinstance(message, ControlError):
        try:
            message = inbox.get(WAIT_S)
        except ControlError as error:
            message = error
        if message is not None:
            messages.put(message)
            news.set()
