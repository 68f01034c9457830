"""Where a process receives its messages: one port, one thread, a queue in memory for each name.

A sender opens a connection for each queue, and first shows that it knows the run's key: the intake sends bytes that it
has drawn, the sender answers with an HMAC-SHA256 over them and the queue's name, then the name. Without that it can add
nothing to a queue. What follows are entries, each behind its length, whose meaning is the matter of
hpcrl.control.queues. Nothing can be read from an intake.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from queue import Queue

from torch.distributed import TCPStore

from hpcrl.control import network
from hpcrl.exitcodes import ExitCode

MAX_ENTRY_BYTES = (64 << 20) + 1024
"""A connection with a longer one is closed."""
MAC_BYTES, DRAWN_BYTES = 32, 16
MAX_HELLO_BYTES = MAC_BYTES + 64
RECEIVE_BYTES = 1 << 18
RETRY_S = 0.1
_LENGTH = struct.Struct("<I")

Push = Callable[[bytes], None]
"""Sends an entry; OSError if the intake is gone or does not take it in time. What is sent right after its end may still
go without an error."""


def mac(key: bytes, text: bytes) -> bytes:
    """HMAC-SHA256, MAC_BYTES long."""
    return hmac.digest(key, text, "sha256")


def owner(queue: str) -> int:
    """The rank that receives a queue: NAME/RANK, or the one queue of rank 0 that has no number."""
    return int(queue.partition("/")[2] or 0)


class Intake:
    """Receives on a free port of `address`. news: set after every entry, for a reader that waits for several queues."""

    def __init__(self, address: str, key: bytes):
        """OSError if nothing can listen there."""
        self._server = network.listen(address)
        self._server.setblocking(False)
        self.address, self.port = address, int(self._server.getsockname()[1])
        self.news = threading.Event()
        self._queues: dict[str, Queue[bytes]] = {}
        arguments = (self._server, selectors.DefaultSelector(), key, self._queues, self.news)
        threading.Thread(target=_receive, args=arguments, name="intake", daemon=True).start()

    def queue(self, name: str) -> Queue[bytes]:
        """The entries of a queue, in order per connection. What is sent to a queue that nobody has asked for is not
        received."""
        return self._queues.setdefault(name, Queue())

    def publish(self, store: TCPStore, rank: int) -> None:
        """Let the senders of the world find this intake; call it when all of its queues are there."""
        store.set(_address_key(rank), f"{self.address}:{self.port}")

    def close(self) -> None:
        """Receive no more; connections end."""
        with contextlib.suppress(OSError):  # closed before
            self._server.shutdown(socket.SHUT_RDWR)


def _address_key(rank: int) -> str:
    return f"intake/{rank}"


class Dialer:
    """Connects to the queues of a world's ranks, whose addresses are in the store."""

    def __init__(self, store: TCPStore, key: bytes, connect_s: float, push_s: float):
        """Timeouts, for a connection and for an entry. A process receives nothing while native code in it holds the
        interpreter lock."""
        self._store, self._key, self._connect_s, self._push_s = store, key, connect_s, push_s

    def __call__(self, queue: str) -> Push:
        """A new connection to a queue. OSError if its rank has no intake or is gone."""
        try:
            host, port = self._store.get(_address_key(owner(queue))).decode().rsplit(":", 1)
            return connect(host, int(port), queue, self._key, self._connect_s, self._push_s)
        except ValueError as error:
            raise OSError(f"the store has a wrong address of rank {owner(queue)}: {error}") from error
        except RuntimeError as error:  # all errors of the store
            raise OSError(f"the store has no address of rank {owner(queue)}") from error


def connect(host: str, port: int, queue: str, key: bytes, connect_s: float, push_s: float) -> Push:
    """A connection to a queue of the intake at host:port; OSError if nothing listens there."""
    connection = socket.create_connection((host, port), connect_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(push_s)

    def push(entry: bytes) -> None:
        connection.sendall(_LENGTH.pack(len(entry)) + entry)

    drawn = b""
    while len(drawn) < DRAWN_BYTES:
        if not (arrived := connection.recv(DRAWN_BYTES - len(drawn))):
            raise ConnectionResetError(f"what listens at {host}:{port} is no intake")
        drawn += arrived
    push(mac(key, drawn + queue.encode()) + queue.encode())
    return push


# -- the receiving thread; it holds no reference to the intake --------------------------------------------------------


class _Sender:
    """One connection to the intake."""

    def __init__(self, connection: socket.socket, key: bytes):
        """OSError if the connection has ended."""
        self.connection, self._key, self._drawn = connection, key, secrets.token_bytes(DRAWN_BYTES)
        self._queue: Queue[bytes] | None = None  # until it is known who sends to which
        self._arrived = bytearray()
        connection.setblocking(False)
        connection.send(self._drawn)  # the first bytes of a connection find room

    def take(self, queues: Mapping[str, Queue[bytes]]) -> bool:
        """Pass on what has arrived; whether a whole entry has. OSError if the connection has ended or is to end."""
        received = self.connection.recv(RECEIVE_BYTES)
        if not received:
            raise ConnectionResetError("the sender is gone")
        self._arrived += received
        passed_on = False
        while (entry := self._next()) is not None:
            if self._queue is None:
                self._queue = self._asked(entry, queues)
            else:
                self._queue.put(entry)
                passed_on = True
        return passed_on

    def _next(self) -> bytes | None:
        """The first entry, if it has arrived as a whole."""
        if len(self._arrived) < _LENGTH.size:
            return None
        length = _LENGTH.unpack_from(self._arrived)[0]
        if length > (MAX_ENTRY_BYTES if self._queue is not None else MAX_HELLO_BYTES):
            raise ConnectionAbortedError(f"an entry of {length} bytes")
        end = _LENGTH.size + length
        if len(self._arrived) < end:
            return None
        entry = bytes(self._arrived[_LENGTH.size : end])
        del self._arrived[:end]
        return entry

    def _asked(self, hello: bytes, queues: Mapping[str, Queue[bytes]]) -> Queue[bytes]:
        shown, name = hello[:MAC_BYTES], hello[MAC_BYTES:]
        queue = queues.get(name.decode(errors="replace"))
        if queue is None or not hmac.compare_digest(shown, mac(self._key, self._drawn + name)):
            raise ConnectionAbortedError("it does not know the key, or the queue")
        return queue


def _receive(
    server: socket.socket,
    selector: selectors.BaseSelector,
    key: bytes,
    queues: Mapping[str, Queue[bytes]],
    news: threading.Event,
) -> None:
    """Until the server is shut down. A process that could no longer hear ends."""
    try:
        with selector, server:
            selector.register(server, selectors.EVENT_READ)
            while _receive_once(server, selector, key, queues, news):
                pass
            for sender in list(selector.get_map().values()):
                sender.fileobj.close()  # type: ignore[union-attr]
    except BaseException:
        traceback.print_exc()
        os._exit(ExitCode.STORE_LOST)


def _receive_once(
    server: socket.socket,
    selector: selectors.BaseSelector,
    key: bytes,
    queues: Mapping[str, Queue[bytes]],
    news: threading.Event,
) -> bool:
    """Whether to go on."""
    for ready, _ in selector.select():
        if ready.fileobj is server:
            if not _accept(server, selector, key):
                return False
            continue
        try:
            if ready.data.take(queues):
                news.set()
        except BlockingIOError:
            continue
        except OSError:
            selector.unregister(ready.fileobj)
            ready.data.connection.close()
    return True


def _accept(server: socket.socket, selector: selectors.BaseSelector, key: bytes) -> bool:
    """Take a connection; False if the server was shut down."""
    try:
        connection, _ = server.accept()
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            time.sleep(RETRY_S)  # the connection waits
        return True
    try:
        selector.register(connection, selectors.EVENT_READ, _Sender(connection, key))
    except OSError:
        connection.close()
    return True
