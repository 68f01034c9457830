"""End connections to hosts that have vanished: a host that is off or unreachable does not close its connections.

The kernel probes an idle connection (SO_KEEPALIVE). It does not probe one with unacknowledged bytes, but retransmits
them for a quarter of an hour. TCP_USER_TIMEOUT would also end a connection whose reader is only slow, so a thread polls
the kernel's TCP_INFO instead. In both cases the other host's kernel answers, so a process that is stopped, suspended or
busy does not count as gone.
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

ROUNDS = 12  # polls per deadline
KEEP_IDLE, KEEP_EVERY, KEEP_COUNT = 3, 9, 3  # three probes: after 1/3 of a deadline without bytes, then every 1/9
UNANSWERED = 2 / 3
"""Fraction of a deadline after which a connection ends, as with the probes above; the rest is for handling the loss."""
ESTABLISHED, CLOSE_WAIT = 1, 8  # enum of tcp_states.h
_INFO = struct.Struct("=3xB20xI16xI8xI")
"""The start of struct tcp_info: unanswered probes, unacknowledged segments, and milliseconds since bytes were last
(re)sent and since the last acknowledgement."""


class DeadHostWatch:
    """Ends this process's (also libraries') TCP connections whose host does not answer, after at most deadline_s."""

    def __init__(self, deadline_s: float):
        self._deadline_s = deadline_s
        self._stopped = threading.Event()
        self._since: dict[int, float] = {}  # socket's inode -> time since which nothing was answered
        threading.Thread(target=self._look_forever, name="vanished watch", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def _look_forever(self) -> None:
        while not self._stopped.wait(self._deadline_s / ROUNDS):
            self.look()

    def look(self) -> None:
        """Poll all connections once; end each one that has gone unanswered for too long."""
        if socket.getdefaulttimeout() is not None:  # a second handle would make the connection non-blocking
            return
        now, before = time.monotonic(), self._since
        self._since = {}
        for inode, connection in _connections():
            with connection, contextlib.suppress(OSError):  # closed meanwhile
                ask_when_idle(connection, self._deadline_s)
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
                probes, unacked, sent_ms, answer_ms = _INFO.unpack(info)
                # A host with a full receive buffer is probed ever more rarely; it answers all but quick repetitions.
                if not (probes > 1 or (unacked and answer_ms > sent_ms)):
                    continue
                since = max(before.get(inode, now), now - answer_ms / 1000)
                if now - since > UNANSWERED * self._deadline_s:
                    connection.shutdown(socket.SHUT_RDWR)
                else:
                    self._since[inode] = since


def state_of(connection: socket.socket) -> int:
    """A TCP connection's state, as the kernel numbers it: CLOSE_WAIT once the other side has closed it."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO) & 0xFF


def ask_when_idle(connection: socket.socket, deadline_s: float) -> None:
    """Let the kernel probe an idle connection and end it when the other host does not answer."""
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
    """Duplicated handles of this process's TCP connections, with their sockets' inodes."""
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
