"""Signed, ordered, schema-checked messages from rank to rank (see docs/control_plane.md).

A message is an entry of a queue (hpcrl.messaging.mailbox_server): HMAC-SHA256 over (queue name, frame), then the frame:
msgpack of (sender, seq, body). The per-job key is never sent. This gives integrity and order, not secrecy.

Per queue and sender, the sequence number rises by one with each message. Forged (wrong MAC), replayed (old number) and
malformed messages are refused, logged and listed in `Inbox.refused`, up to NAMED_REFUSALS. After a gap, nothing more
from this sender is accepted, and the reader is notified that its messages have ended.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import Empty
from typing import Any

import msgspec
from torch.distributed import DistError, TCPStore

from hpcrl.messaging import network
from hpcrl.messaging.mailbox_server import MAC_BYTES, Arrival, Arrivals, Push, SenderEnded, mac

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
NAMED_REFUSALS = 100  # a flood must not fill the memory or the disk


class ControlError(RuntimeError):
    """The control plane is unusable or not trustworthy."""


class StoreLost(ControlError):
    """The store does not answer: its process ended or the network failed."""


class ReaderLost(ControlError):
    """A queue's reader does not accept messages: its process ended or the network failed. `seq` is the number of the
    message that was not sent."""

    def __init__(self, message: str, seq: int):
        super().__init__(message)
        self.seq = seq


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Signed together with the queue's name."""

    sender: int
    seq: int
    body: bytes


def connect(host: str, port: int, timeout_s: float) -> TCPStore:
    """A new client of the store at host:port. StoreLost if the store does not answer in time."""
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (DistError, RuntimeError) as error:
        raise StoreLost(f"no control store at {host}:{port} within {timeout_s:g} s") from error


def serve(address: str, timeout_s: float) -> TCPStore:
    """A new store on a free port of this process, with a client; it listens on `address` only."""
    listener = network.listen(address)
    port, descriptor = listener.getsockname()[1], listener.detach()
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=descriptor,  # owned by the store from now on
    )


def sign(key: bytes, name: str, frame: bytes) -> bytes:
    """A frame's signed entry for queue `name`."""
    return mac(key, name.encode() + b"\0" + frame) + frame


@dataclass
class _Line:
    """State of sending to one queue. `push` is None until the first message, `seq` is the last message's number, and
    `lost` is why the queue no longer has a reader."""

    push: Push | None = None
    seq: int = 0
    lost: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Sender:
    """Sends messages to named queues as one sender; safe to use from several threads."""

    def __init__(self, dial: Callable[[str], Push], key: bytes, sender: int):
        """`dial` connects to a queue (hpcrl.messaging.mailbox_server.Dialer)."""
        self._dial, self._key, self.sender = dial, key, sender
        self._lines: dict[str, _Line] = {}
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, name: str, message: Any) -> int:
        """Send `message` to queue `name`; return its number, counted from 1 per queue. The message must not change
        afterwards: if it has to wait, it may be encoded again.

        ValueError if the message exceeds 64 MiB; ReaderLost if the queue's reader is gone, and at once on later calls.
        """
        body = self._encoder.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"{type(message).__name__} to {name} has {len(body)} bytes, over the limit of {MAX_MESSAGE_BYTES}: "
                "store large data in files and send their paths"
            )
        line = self._lines.get(name) or self._lines.setdefault(name, _Line())  # all threads share it
        with line.lock:
            line.seq += 1
            if not line.lost:
                try:
                    line.push = line.push or self._dial(name)
                    line.push(self._entry(name, line.seq, body), partial(self._encode, name, line.seq, message))
                except OSError as error:
                    line.lost, line.push = str(error), None
            if line.lost:
                text = f"{type(message).__name__} to {name} was not sent, its reader is gone: {line.lost}"
                raise ReaderLost(text, line.seq)
            return line.seq

    def _encode(self, name: str, seq: int, message: Any) -> bytes:
        return self._entry(name, seq, self._encoder.encode(message))

    def _entry(self, name: str, seq: int, body: bytes) -> bytes:
        return sign(self._key, name, msgspec.msgpack.encode(Frame(self.sender, seq, body)))


class Inbox:
    """The only reader of a queue."""

    def __init__(self, arrivals: Arrivals, name: str, key: bytes, types: Any):
        """`arrivals` are the entries of queue `name` (hpcrl.messaging.mailbox_server.MailboxServer.queue)."""
        self.name, self._key, self._arrivals = name, key, arrivals
        self.refused: list[str] = []
        self.num_refused = 0
        self._decoder = msgspec.msgpack.Decoder(types)
        self._frames = msgspec.msgpack.Decoder(Frame)
        self._last: dict[int, int] = defaultdict(int)
        self._broken: set[int] = set()
        self._ended: list[SenderEnded] = []

    def get(self, timeout_s: float = 0.0) -> tuple[int, int, Any] | None:
        """The next valid message as (sender, seq, message), None if there is none within timeout_s or a sender has
        ended (take_ended)."""
        deadline = time.monotonic() + timeout_s
        waiting = self._arrivals.qsize()
        while True:
            wait_s = deadline - time.monotonic()
            try:
                arrived = self._arrivals.get(wait_s > 0, max(0.0, wait_s))
            except Empty:
                return None
            if isinstance(arrived, SenderEnded):
                self._ended.append(arrived)
                return None
            opened = self._open(arrived)
            if not isinstance(opened, str):
                return opened
            self._refuse(opened)
            waiting -= 1
            if self._ended or (waiting <= 0 and time.monotonic() > deadline):  # refused messages may never stop
                return None

    def take_ended(self) -> list[SenderEnded]:
        """The senders whose messages have ended since the last call, including senders that closed their connection
        after their last message."""
        ended, self._ended = self._ended, []
        return ended

    def _open(self, entry: Arrival) -> tuple[int, int, Any] | str:
        """The message, or why it is refused."""
        sender, raw = entry
        frame = raw[MAC_BYTES:]
        if not hmac.compare_digest(raw, sign(self._key, self.name, frame)):
            return f"a message of {len(raw)} bytes with a wrong signature"
        try:
            opened = self._frames.decode(frame)
        except msgspec.MsgspecError as error:
            return f"a signed message that is not a frame: {error}"
        if opened.sender != sender:
            return f"message {opened.seq}, signed as sender {opened.sender}, on the connection of sender {sender}"
        expected = self._last[sender] + 1
        if opened.seq < expected:
            return f"message {opened.seq} of sender {sender}, replayed (expected {expected})"
        if opened.seq > expected or sender in self._broken:
            why = f"message {opened.seq} of sender {sender} came where {expected} was expected; messages were lost"
            if sender not in self._broken:
                self._broken.add(sender)
                self._ended.append(SenderEnded(sender, "gap", f"queue {self.name}: {why}"))
            return why
        self._last[sender] = opened.seq
        try:
            return sender, opened.seq, self._decoder.decode(opened.body)
        except msgspec.MsgspecError as error:
            return f"message {opened.seq} of sender {sender} does not fit the schema: {error}"

    def _refuse(self, what: str) -> None:
        self.num_refused += 1
        if self.num_refused <= NAMED_REFUSALS:
            self.refused.append(what)
            logger.warning("refused on queue %s: %s", self.name, what)
