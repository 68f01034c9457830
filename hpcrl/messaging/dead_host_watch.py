"""Connections to hosts that have vanished end: a host that is off, or cut off, sends no end of its connections.

An idle connection is asked by the kernel (SO_KEEPALIVE). One with bytes on the way is not, and its kernel would repeat
them for a quarter of an hour. TCP_USER_TIMEOUT would also end a connection whose reader only takes its time, so a
thread looks at what the kernel knows instead. In both cases the other host's kernel answers, and a process that is
stopped, suspended or busy is not taken for gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator

ROUNDS = 12  # looks in a deadline
KEEP_IDLE, KEEP_EVERY, KEEP_COUNT = 3, 9, 3  # of a deadline: a third without bytes, then three questions a ninth apart
UNANSWERED = 2 / 3
"""Share of a deadline after which a connection ends, as with the questions above: the rest is for whoever notices."""
ESTABLISHED, CLOSE_WAIT = 1, 8  # enum of tcp_states.h
_INFO = struct.Struct("=3xB20xI16xI8xI")
"""The start of struct tcp_info: unanswered probes, segments without an answer, and milliseconds since the last bytes
were sent (again) and since the last answer."""


class DeadHostWatch:
    """Ends this process's TCP connections, those of libraries included, to hosts that do not answer for deadline_s at
    most."""

    def __init__(self, deadline_s: float):
        self._deadline_s = deadline_s
        self._stopped = threading.Event()
        self._since: dict[int, float] = {}  # socket's inode -> since when nothing was answered
        threading.Thread(target=self._look_forever, name="vanished watch", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def _look_forever(self) -> None:
        while not self._stopped.wait(self._deadline_s / ROUNDS):
            self.look()

    def look(self) -> None:
        """One look at all connections; ends those whose time is over."""
        if socket.getdefaulttimeout() is not None:  # a second handle would make the connection non-blocking
            return
        now, before = time.monotonic(), self._since
        self._since = {}
        for inode, connection in _connections():
            with connection, contextlib.suppress(OSError):  # closed meanwhile
                ask_when_idle(connection, self._deadline_s)
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
                probes, unacked, sent_ms, answer_ms = _INFO.unpack(info)
                # A host whose reader has no room is asked ever more rarely, and answers but for quick repetitions.
                if not (probes > 1 or (unacked and answer_ms > sent_ms)):
                    continue
                since = max(before.get(inode, now), now - answer_ms / 1000)
                if now - since > UNANSWERED * self._deadline_s:
                    connection.shutdown(socket.SHUT_RDWR)
                else:
                    self._since[inode] = since


def state_of(connection: socket.socket) -> int:
    """Of a TCP connection, as the kernel numbers them: CLOSE_WAIT once the other side has closed it."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO) & 0xFF


def ask_when_idle(connection: socket.socket, deadline_s: float) -> None:
    """Let the kernel end a connection without bytes when the other host does not answer."""
    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
        return
    for option, value in (
        (socket.TCP_KEEPIDLE, deadline_s / KEEP_IDLE),
        (socket.TCP_KEEPINTVL, deadline_s / KEEP_EVERY),
        (socket.TCP_KEEPCNT, KEEP_COUNT),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, max(1, int(value)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _connections() -> Iterator[tuple[int, socket.socket]]:
    """Second handles of the process's TCP connections, with the inodes of their sockets."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or another kind of socket
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
            if (
                found.family in (socket.AF_INET, socket.AF_INET6)
                and found.type == socket.SOCK_STREAM
                and state_of(found) == ESTABLISHED
            ):
                yield status.st_ino, found
            else:
                found.close()
