"""Receive a process's messages: one port, one thread, one in-memory queue per name.

A sender opens one connection per queue, and first proves that it has the run's key: the mailbox server sends random
bytes; the sender answers with an HMAC-SHA256 over these bytes, its number and the queue's name, then number and name.
The mailbox server answers with the reason for a refusal, empty if it accepts. Length-prefixed messages follow;
hpcrl.messaging.queues interprets them. Clients can only send: nobody can read or remove a message over a connection.
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
from typing import Literal, NamedTuple, Protocol

from torch.distributed import TCPStore

from hpcrl.messaging import network
from hpcrl.messaging.dead_host_watch import CLOSE_WAIT, state_of
from hpcrl.messaging.nonblocking_sender import Encode, NonBlockingSender
from hpcrl.system.exit_codes import ExitCode

logger = logging.getLogger(__name__)

MAX_ENTRY_BYTES = (64 << 20) + 1024
"""A connection that sends a longer entry is closed."""
MAC_BYTES, DRAWN_BYTES = 32, 16
MAX_HELLO_BYTES = MAC_BYTES + 64
RECEIVE_BYTES = 1 << 18
RETRY_S = 0.1
_LENGTH = struct.Struct("<I")


class Arrival(NamedTuple):
    """An entry from an authenticated sender."""

    sender: int
    raw: bytes


class SenderEnded(NamedTuple):
    """Nothing more arrives from a sender: its connection was closed, its host no longer answers (vanished), one of its
    messages is missing (gap), or it accepts nothing that this process sends (unreached)."""

    sender: int
    how: Literal["closed", "vanished", "gap", "unreached"]
    why: str


Arrivals = Queue[Arrival | SenderEnded]


class Push(Protocol):
    """Sends an entry; OSError if the mailbox server is gone or does not accept it in time. An entry sent right after
    the server's end may be lost without an error. `encode` returns the entry again; a Push may keep it instead."""

    def __call__(self, entry: bytes, encode: Encode | None = None, /) -> None: ...


def mac(key: bytes, text: bytes) -> bytes:
    """HMAC-SHA256, MAC_BYTES long."""
    return hmac.digest(key, text, "sha256")


def owner(queue: str) -> int:
    """The rank that receives a queue: NAME/RANK, or rank 0 for a queue without a number."""
    return int(queue.partition("/")[2] or 0)


class MailboxServer:
    """Receives on a free port of `address`. `wakeup` is set after every entry, for readers of several queues."""

    def __init__(self, address: str, key: bytes):
        """OSError if `address` cannot be listened on."""
        self._server = network.listen(address)
        self._server.setblocking(False)
        self.address, self.port = address, int(self._server.getsockname()[1])
        self.wakeup = threading.Event()
        self._queues: dict[str, Arrivals] = {}
        arguments = (self._server, selectors.DefaultSelector(), key, self._queues, self.wakeup)
        threading.Thread(target=_receive, args=arguments, name="mailbox server", daemon=True).start()

    def queue(self, name: str) -> Arrivals:
        """A queue's entries, in order per sender. The first call creates the queue; unknown queues are refused."""
        return self._queues.setdefault(name, Queue())

    def publish(self, store: TCPStore, rank: int) -> None:
        """Put the address into the store, for senders. Call it once all queues of this mailbox server exist."""
        store.set(_address_key(rank), f"{self.address}:{self.port}")

    def close(self) -> None:
        """Stop receiving; all connections end."""
        with contextlib.suppress(OSError):  # already closed
            self._server.shutdown(socket.SHUT_RDWR)


def _address_key(rank: int) -> str:
    return f"mailbox/{rank}"


class Dialer:
    """Connects to the queues of a world's ranks, whose addresses are in the store.

    Args:
        connect_s: Timeout for opening a connection.
        push_s: Timeout for sending an entry; a process receives nothing while native code holds its GIL.
        unreached: Called with a rank that accepts nothing, and the reason. If it is given, sending never blocks
            (hpcrl.messaging.nonblocking_sender).
    """

    def __init__(
        self,
        store: TCPStore,
        key: bytes,
        sender: int,
        connect_s: float,
        push_s: float,
        unreached: Callable[[int, str], None] | None = None,
    ):
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
        return lambda entry, encode=None: unblocked.send(_framed(entry), encode and (lambda: _framed(encode())))

    def _open(self, queue: str) -> socket.socket:
        try:
            host, port = self._store.get(_address_key(owner(queue))).decode().rsplit(":", 1)
            return _open(host, int(port), queue, self._key, self._sender, self._connect_s, self._push_s)
        except ValueError as error:
            raise OSError(f"the store has a wrong address of rank {owner(queue)}: {error}") from error
        except RuntimeError as error:  # all errors of the store
            raise OSError(f"the store has no address of rank {owner(queue)}") from error


def connect(host: str, port: int, queue: str, key: bytes, sender: int, connect_s: float, push_s: float) -> Push:
    """Connect a sender to a queue of the mailbox server at host:port. OSError if nothing listens there, or, with the
    mailbox server's reason, if it refuses this sender."""
    return _push_to(_open(host, port, queue, key, sender, connect_s, push_s))


def _push_to(connection: socket.socket) -> Push:
    return lambda entry, encode=None: connection.sendall(_framed(entry))


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


# -- the receiving thread, which holds no reference to the mailbox server --------------------------------------------


class _Sender:
    """One connection to the mailbox server."""

    def __init__(self, connection: socket.socket, key: bytes, taken: set[tuple[int, str]]):
        """`taken` has (sender, queue) of every connection so far. OSError if the connection has ended."""
        self.connection, self._key, self._drawn = connection, key, secrets.token_bytes(DRAWN_BYTES)
        self._taken, self._number = taken, 0
        self._queue: Arrivals | None = None  # until the sender has named itself and its queue
        self._arrived = bytearray()
        connection.setblocking(False)
        connection.send(self._drawn)  # does not block: the send buffer is empty

    def take(self, queues: Mapping[str, Arrivals]) -> bool:
        """Put complete entries into the queue; return whether there were any. OSError if the connection is to end."""
        received = self.connection.recv(RECEIVE_BYTES)
        if not received:
            if state_of(self.connection) != CLOSE_WAIT:  # DeadHostWatch has ended it on this side
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
        """Close the connection and notify the queue's reader; return whether there is a reader."""
        self.connection.close()
        if self._queue is not None:
            gone = isinstance(error, TimeoutError)
            why = "its host does not answer" if gone else str(error)
            self._queue.put(SenderEnded(self._number, "vanished" if gone else "closed", why))
        return self._queue is not None

    def _next(self) -> bytes | None:
        """The first entry, if all of it has arrived."""
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
    """Receive until the server is shut down. An error ends the process, which could not receive any more."""
    taken: set[tuple[int, str]] = set()
    try:
        with selector, server:
            selector.register(server, selectors.EVENT_READ)
            while _receive_once(server, selector, key, taken, queues, wakeup):
                pass
            for sender in list(selector.get_map().values()):
                sender.fileobj.close()  # type: ignore[union-attr]
    except BaseException:
        with contextlib.suppress(OSError):  # the log may have no reader
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
    """Handle all ready connections once; False if the server was shut down."""
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
    """Accept a connection; False if the server was shut down."""
    try:
        connection, _ = server.accept()
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            time.sleep(RETRY_S)  # the connection stays in the backlog
        return True
    try:
        selector.register(connection, selectors.EVENT_READ, _Sender(connection, key, taken))
    except OSError:
        connection.close()
    return True
