"""Where a process receives its messages: one port, one thread, a queue in memory for each name.

A sender opens a connection for each queue. What it sends are strings of bytes, each behind its length; the first is the
name of the queue. What stands in them is the matter of hpcrl.control.queues. Nothing can be read from outside.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue

from torch.distributed import DistError, TCPStore

from hpcrl.control import network

MAX_ENTRY_BYTES = (64 << 20) + 1024
"""A connection with a longer one is closed."""
MAX_NAME_BYTES = 64
RECEIVE_BYTES = 1 << 18
RETRY_S = 0.1
_LENGTH = struct.Struct("<I")

Push = Callable[[bytes], None]
"""Sends an entry; OSError if the intake is gone or does not take it in time."""


def owner(queue: str) -> int:
    """The rank that receives a queue: NAME/RANK, or the one queue of rank 0 that has no number."""
    return int(queue.partition("/")[2] or 0)


class Intake:
    """Receives on a free port of `address`. news: set after every entry, for a reader that waits for several queues."""

    def __init__(self, address: str):
        self._server = network.listen(address)
        self._server.setblocking(False)
        self.address, self.port = address, int(self._server.getsockname()[1])
        self.news = threading.Event()
        self._queues: dict[str, SimpleQueue[bytes]] = {}
        arguments = (self._server, selectors.DefaultSelector(), self._queues, self.news)
        threading.Thread(target=_receive, args=arguments, name="intake", daemon=True).start()

    def queue(self, name: str) -> SimpleQueue[bytes]:
        """The entries of a queue, in order per connection. What is sent to a queue that nobody has asked for is not
        received."""
        return self._queues.setdefault(name, SimpleQueue())

    def publish(self, store: TCPStore, rank: int) -> None:
        """Let the senders of the world find this intake; call it when all of its queues are there."""
        store.set(_key(rank), f"{self.address}:{self.port}")

    def close(self) -> None:
        """Receive no more; connections end."""
        with contextlib.suppress(OSError):  # closed before
            self._server.shutdown(socket.SHUT_RDWR)


def _key(rank: int) -> str:
    return f"intake/{rank}"


class Dialer:
    """Connects to the queues of a world's ranks, whose addresses are in the store."""

    def __init__(self, store: TCPStore, connect_s: float, push_s: float):
        """Timeouts, for a connection and for an entry. A process receives nothing while native code in it holds the
        interpreter lock."""
        self._store, self._connect_s, self._push_s = store, connect_s, push_s

    def __call__(self, queue: str) -> Push:
        """A new connection to a queue. OSError if its rank has no intake or is gone."""
        try:
            host, port = self._store.get(_key(owner(queue))).decode().rsplit(":", 1)
        except (DistError, RuntimeError) as error:
            raise OSError(f"the store has no address of rank {owner(queue)}") from error
        return connect(host, int(port), queue, self._connect_s, self._push_s)


def connect(host: str, port: int, queue: str, connect_s: float, push_s: float) -> Push:
    """A connection to a queue of the intake at host:port; OSError if nothing listens there."""
    connection = socket.create_connection((host, port), connect_s)
    connection.settimeout(push_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def push(entry: bytes) -> None:
        connection.sendall(_LENGTH.pack(len(entry)) + entry)

    push(queue.encode())
    return push


# -- the receiving thread; it holds no reference to the intake --------------------------------------------------------


class _Sender:
    """One connection to the intake."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self._queue: SimpleQueue[bytes] | None = None  # until its name has arrived
        self._arrived = bytearray()

    def take(self, queues: Mapping[str, SimpleQueue[bytes]]) -> bool:
        """Pass on what has arrived; whether a whole entry has. OSError if the connection has ended or is to end."""
        received = self.connection.recv(RECEIVE_BYTES)
        if not received:
            raise ConnectionResetError("the sender is gone")
        self._arrived += received
        passed_on = False
        while (entry := self._next()) is not None:
            if self._queue is not None:
                self._queue.put(entry)
                passed_on = True
            else:
                self._queue = queues.get(entry.decode(errors="replace"))
                if self._queue is None:
                    raise ConnectionAbortedError(f"no queue is called {entry!r}")
        return passed_on

    def _next(self) -> bytes | None:
        """The first entry, if it has arrived as a whole."""
        if len(self._arrived) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._arrived)[0]
        if end > (MAX_ENTRY_BYTES if self._queue is not None else MAX_NAME_BYTES):
            raise ConnectionAbortedError(f"an entry of {end} bytes")
        if len(self._arrived) < end:
            return None
        entry = bytes(self._arrived[_LENGTH.size : end])
        del self._arrived[:end]
        return entry


def _receive(
    server: socket.socket,
    selector: selectors.BaseSelector,
    queues: Mapping[str, SimpleQueue[bytes]],
    news: threading.Event,
) -> None:
    with selector, server:
        selector.register(server, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        if not _accept(server, selector):
                            return
                        continue
                    try:
                        if key.data.take(queues):
                            news.set()
                    except BlockingIOError:
                        continue
                    except OSError:
                        selector.unregister(key.fileobj)
                        key.data.connection.close()
        finally:
            for key in list(selector.get_map().values()):
                if key.data is not None:
                    key.data.connection.close()


def _accept(server: socket.socket, selector: selectors.BaseSelector) -> bool:
    """Take a connection; False if the intake was closed."""
    try:
        connection, _ = server.accept()
    except OSError as error:
        if error.errno == errno.EINVAL:  # shut down
            return False
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            time.sleep(RETRY_S)  # the connection waits
        return True
    connection.setblocking(False)
    selector.register(connection, selectors.EVENT_READ, _Sender(connection))
    return True
