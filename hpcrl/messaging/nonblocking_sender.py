"""Send without waiting for the reader.

Rank 0 sends to every rank. If it waited for one rank that accepts nothing (stopped, busy in native code, on a host that
has vanished), all ranks would wait.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable

MAX_UNSENT_BYTES = 256 << 20


class NonBlockingSender:
    """Sends as much as the connection's buffer accepts. A thread opens the connection and sends the rest in order."""

    def __init__(self, connect: Callable[[], socket.socket], push_s: float, failed: Callable[[OSError], None]):
        """The reader may accept nothing for `push_s`. `failed` is called once, in the thread, when sending fails."""
        self._connect, self._push_s, self._failed = connect, push_s, failed
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._error: OSError | None = None

    def send(self, data: bytes) -> None:
        """Return immediately. OSError after a failure, or if more than MAX_UNSENT_BYTES would be unsent."""
        with self._lock:
            if self._error is not None:
                raise self._error
            rest = memoryview(data)
            if self._connection is not None and not self._unsent:
                rest = _send_some(self._connection, rest)
            if not rest:
                return
            if (num_bytes := sum(map(len, self._unsent)) + len(rest)) > MAX_UNSENT_BYTES:
                raise TimeoutError(f"{num_bytes} unsent bytes, over the limit of {MAX_UNSENT_BYTES}")
            self._unsent.append(rest)
            if len(self._unsent) == 1:
                threading.Thread(target=self._work, name="unsent", daemon=True).start()

    def _work(self) -> None:
        try:
            if self._connection is None:
                connection = self._connect()
                connection.setblocking(False)
                self._connection = connection
            self._send_rest(self._connection)
        except OSError as error:
            with self._lock:
                self._error = error
                self._unsent.clear()
            self._failed(error)

    def _send_rest(self, connection: socket.socket) -> None:
        room = select.poll()
        room.register(connection, select.POLLOUT)
        while True:
            if not room.poll(self._push_s * 1000):
                raise TimeoutError(f"it accepted no data for {self._push_s:g} s")
            with self._lock:
                if rest := _send_some(connection, self._unsent[0]):
                    self._unsent[0] = rest
                    continue
                self._unsent.popleft()
                if not self._unsent:
                    return


def _send_some(connection: socket.socket, data: memoryview) -> memoryview:
    """Send without blocking; return the unsent rest."""
    try:
        return data[connection.send(data) :]
    except BlockingIOError:
        return data
