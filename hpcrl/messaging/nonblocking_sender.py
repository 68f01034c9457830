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
Encode = Callable[[], bytes]


class NonBlockingSender:
    """Sends as much as the connection's buffer accepts. A thread opens the connection and sends the rest in order."""

    def __init__(self, connect: Callable[[], socket.socket], push_s: float, failed: Callable[[OSError], None]):
        """The reader may accept nothing for `push_s`. `failed` is called once, in the thread, when sending fails."""
        self._connect, self._push_s, self._failed = connect, push_s, failed
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._unsent: deque[memoryview | Encode] = deque()
        self._error: OSError | None = None

    def send(self, data: bytes, encode: Encode | None = None) -> None:
        """Return immediately. OSError after a failure. If more than MAX_UNSENT_BYTES would be unsent, only `encode` is
        kept; it returns `data` again once all earlier data are sent."""
        with self._lock:
            if self._error is not None:
                raise self._error
            rest = memoryview(data)
            if self._unsent:
                num_bytes = sum(len(unsent) for unsent in self._unsent if isinstance(unsent, memoryview))
                over = num_bytes + len(rest) > MAX_UNSENT_BYTES
                self._unsent.append(encode if over and encode is not None else rest)
                return
            if self._connection is not None:
                rest = _send_some(self._connection, rest)
            if rest:
                self._unsent.append(rest)
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
            first = self._unsent[0]  # no other thread removes or changes it
            data = first if isinstance(first, memoryview) else memoryview(first())
            if not room.poll(self._push_s * 1000):
                raise TimeoutError(f"it accepted no data for {self._push_s:g} s")
            with self._lock:
                if rest := _send_some(connection, data):
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
