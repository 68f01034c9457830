"""Where a process receives its messages: one port, one thread, a queue in memory for each name.

A sender opens one connection for each queue, and first shows that it knows the run's key: the mailbox server sends
bytes that it has drawn, the sender answers with an HMAC-SHA256 over them, its number and the queue's name, then both.
The mailbox server answers with the reason for a refusal, which is empty if there is none. Length-prefixed messages
follow, which hpcrl.messaging.queues interprets. No message can be read from a mailbox server.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import re
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from queue import Queue
from typing import Literal, NamedTuple

from torch.distributed import TCPStore

from hpcrl.messaging import network
from hpcrl.messaging.dead_host_watch import CLOSE_WAIT, state_of
from hpcrl.messaging.nonblocking_sender import NonBlockingSender
from hpcrl.system.exit_codes import ExitCode

logger = logging.getLogger(__name__)

MAX_ENTRY_BYTES = (64 << 20) + 1024
"""A connection with a longer one is closed."""
MAC_BYTES, DRAWN_BYTES = 32, 16
MAX_HELLO_BYTES = MAC_BYTES + 64
RECEIVE_BYTES = 1 << 18
RETRY_S = 0.1
_LENGTH = struct.Struct("<I")


class Arrival(NamedTuple):
    """What a sender, which has shown its number, has sent."""

    sender: int
    raw: bytes


class SenderEnded(NamedTuple):
    """Nothing more comes from a sender: its connection was closed, its host answers no more (vanished), one of its
    messages is missing (gap), or it takes nothing that this process sends (unreached)."""

    sender: int
    how: Literal["closed", "vanished", "gap", "unreached"]
    why: str


Arrivals = Queue[Arrival | SenderEnded]
Push = Callable[[bytes], None]
"""Sends an entry; OSError if the mailbox server is gone or does not take it in time. What is sent right after its end
may still go without an error."""


def mac(key: bytes, text: bytes) -> bytes:
    """HMAC-SHA256, MAC_BYTES long."""
    return hmac.digest(key, text, "sha256")


def owner(queue: str) -> int:
    """The rank that receives a queue: NAME/RANK, or the one queue of rank 0 that has no number."""
    return int(queue.partition("/")[2] or 0)


class MailboxServer:
    """Receives on a free port of `address`. news: set after every entry, for a reader that waits for several queues."""

    def __init__(self, address: str, key: bytes):
        """OSError if nothing can listen there."""
        self._server = network.listen(address)
        self._server.setblocking(False)
        self.address, self.port = address, int(self._server.getsockname()[1])
        self.wakeup = threading.Event()
        self._queues: dict[str, Arrivals] = {}
        arguments = (self._server, selectors.DefaultSelector(), key, self._queues, self.wakeup)
        threading.Thread(target=_receive, args=arguments, name="mailbox server", daemon=True).start()

    def queue(self, name: str) -> Arrivals:
        """The entries of a queue, in order per sender. What is sent to a queue that nobody has asked for is not
        received."""
        return self._queues.setdefault(name, Queue())

    def publish(self, store: TCPStore, rank: int) -> None:
        """Let the senders of the world find this mailbox server; call it when all of its queues are there."""
        store.set(_address_key(rank), f"{self.address}:{self.port}")

    def close(self) -> None:
        """Receive no more; connections end."""
        with contextlib.suppress(OSError):  # closed before
            self._server.shutdown(socket.SHUT_RDWR)


def _address_key(rank: int) -> str:
    return f"mailbox/{rank}"


class Dialer:
    """Connects to the queues of a world's ranks, whose addresses are in the store."""

    def __init__(
        self,
        store: TCPStore,
        key: bytes,
        sender: int,
        connect_s: float,
        push_s: float,
        unreached: Callable[[int, str], None] | None = None,
    ):
        """Timeouts, for a connection and for an entry. A process receives nothing while native code in it holds the
        interpreter lock. unreached: of a sender that must not wait (hpcrl.messaging.nonblocking_sender), called with a
        rank that takes nothing, and why."""
        self._store, self._key, self._sender, self._connect_s, self._push_s = store, key, sender, connect_s, push_s
        self._unreached = unreached

    def __call__(self, queue: str) -> Push:
        """A new connection to a queue. OSError if its rank has no mailbox server or is gone."""
        unreached = self._unreached
        if unreached is None:
            return _push_to(self._open(queue))
        unblocked = NonBlockingSender(
            lambda: self._open(queue), self._push_s, lambda error: unreached(owner(queue), f"queue {queue}: {error}")
        )
        return lambda entry: unblocked.send(_framed(entry))

    def _open(self, queue: str) -> socket.socket:
        try:
            host, port = self._store.get(_address_key(owner(queue))).decode().rsplit(":", 1)
            return _open(host, int(port), queue, self._key, self._sender, self._connect_s, self._push_s)
        except ValueError as error:
            raise OSError(f"the store has a wrong address of rank {owner(queue)}: {error}") from error
        except RuntimeError as error:  # all errors of the store
            raise OSError(f"the store has no address of rank {owner(queue)}") from error


def connect(host: str, port: int, queue: str, key: bytes, sender: int, connect_s: float, push_s: float) -> Push:
    """The connection of a sender to a queue of the mailbox server at host:port; OSError if nothing listens there, or
    with what the mailbox server says if it takes nothing from this sender."""
    return _push_to(_open(host, port, queue, key, sender, connect_s, push_s))


def _push_to(connection: socket.socket) -> Push:
    return lambda entry: connection.sendall(_framed(entry))


def _framed(entry: bytes) -> bytes:
    return _LENGTH.pack(len(entry)) + entry


def _open(host: str, port: int, queue: str, key: bytes, sender: int, connect_s: float, push_s: float) -> socket.socket:
    connection = socket.create_connection((host, port), connect_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(push_s)

    def read(num_bytes: int) -> bytes:
        arrived = b""
        while len(arrived) < num_bytes:
            if not (more := connection.recv(num_bytes - len(arrived))):
                raise ConnectionResetError(f"{host}:{port} is not a mailbox server of this run")
            arrived += more
        return arrived

    who = f"{sender} {queue}".encode()
    connection.sendall(_framed(mac(key, read(DRAWN_BYTES) + who) + who))
    if refusal := read(read(1)[0]).decode(errors="replace"):
        connection.close()
        raise ConnectionRefusedError(f"{host}:{port} refused sender {sender} of queue {queue}: {refusal}")
    return connection


# -- the receiving thread; it holds no reference to the mailbox server -----------------------------------------------


class _Sender:
    """One connection to the mailbox server."""

    def __init__(self, connection: socket.socket, key: bytes, taken: set[tuple[int, str]]):
        """taken: (sender, queue) of all connections so far. OSError if the connection has ended."""
        self.connection, self._key, self._drawn = connection, key, secrets.token_bytes(DRAWN_BYTES)
        self._taken, self._number = taken, 0
        self._queue: Arrivals | None = None  # until it is known who sends to which
        self._arrived = bytearray()
        connection.setblocking(False)
        connection.send(self._drawn)  # the first bytes of a connection find room

    def take(self, queues: Mapping[str, Arrivals]) -> bool:
        """Pass on what has arrived; whether a whole entry has. OSError if the connection has ended or is to end."""
        received = self.connection.recv(RECEIVE_BYTES)
        if not received:
            if state_of(self.connection) != CLOSE_WAIT:  # ended on this side, by DeadHostWatch
                raise TimeoutError
            raise ConnectionResetError("its connection has ended")
        self._arrived += received
        passed_on = False
        while (entry := self._next()) is not None:
            if self._queue is None:
                self._queue = self._asked(entry, queues)
            else:
                self._queue.put(Arrival(self._number, entry))
                passed_on = True
        return passed_on

    def end(self, error: OSError) -> bool:
        """Close the connection and tell the queue's reader; whether it has one."""
        self.connection.close()
        if self._queue is not None:
            gone = isinstance(error, TimeoutError)
            why = "its host does not answer" if gone else str(error)
            self._queue.put(SenderEnded(self._number, "vanished" if gone else "closed", why))
        return self._queue is not None

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

    def _asked(self, hello: bytes, queues: Mapping[str, Arrivals]) -> Arrivals:
        shown, who = hello[:MAC_BYTES], hello[MAC_BYTES:]
        number, _, name = who.decode(errors="replace").partition(" ")
        queue, refusal = queues.get(name), ""
        if not hmac.compare_digest(shown, mac(self._key, self._drawn + who)):
            refusal = "wrong key for this run"
        elif queue is None or re.fullmatch("-?[0-9]{1,9}", number) is None:
            refusal = "there is no such queue"
        elif (int(number), name) in self._taken:
            refusal = "this sender is connected already: two processes have the same rank"
        self.connection.send(bytes([len(refusal)]) + refusal.encode())
        if queue is None or refusal:
            raise ConnectionAbortedError(refusal)
        self._number = int(number)
        self._taken.add((self._number, name))
        return queue


def _receive(
    server: socket.socket,
    selector: selectors.BaseSelector,
    key: bytes,
    queues: Mapping[str, Arrivals],
    wakeup: threading.Event,
) -> None:
    """Until the server is shut down. A process that could no longer hear ends."""
    taken: set[tuple[int, str]] = set()
    try:
        with selector, server:
            selector.register(server, selectors.EVENT_READ)
            while _receive_once(server, selector, key, taken, queues, wakeup):
                pass
            for sender in list(selector.get_map().values()):
                sender.fileobj.close()  # type: ignore[union-attr]
    except BaseException:
        with contextlib.suppress(OSError):  # without a reader
            logger.critical("nothing more can be received", exc_info=True)
        os._exit(ExitCode.STORE_LOST)


def _receive_once(
    server: socket.socket,
    selector: selectors.BaseSelector,
    key: bytes,
    taken: set[tuple[int, str]],
    queues: Mapping[str, Arrivals],
    wakeup: threading.Event,
) -> bool:
    """Whether to go on."""
    for ready, _ in selector.select():
        if ready.fileobj is server:
            if not _accept(server, selector, key, taken):
                return False
            continue
        try:
            if ready.data.take(queues):
                wakeup.set()
        except BlockingIOError:
            continue
        except OSError as error:
            selector.unregister(ready.fileobj)
            if ready.data.end(error):
                wakeup.set()
    return True


def _accept(server: socket.socket, selector: selectors.BaseSelector, key: bytes, taken: set[tuple[int, str]]) -> bool:
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
        selector.register(connection, selectors.EVENT_READ, _Sender(connection, key, taken))
    except OSError:
        connection.close()
    return True
