"""Signed, ordered, schema-checked messages over the queues of a TCPStore (see docs/control_plane.md).

A message is split into frames of up to 1 MiB of its msgpack. An entry of the queue is HMAC-SHA256 over (queue name,
frame), then the frame: msgpack of (sender, seq, body, more). The per-job key is never sent. This gives integrity and
order, not secrecy: any process that reaches the port can list and read the queues.

Per queue and sender, the sequence number rises by one with each frame. Forged (wrong MAC), replayed (old number),
malformed or too large frames are refused and named in `Inbox.refused` and on stderr. A gap raises `ControlError`,
because a command may be lost.
"""

from __future__ import annotations

import hmac
import sys
import threading
import time
from collections import defaultdict
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import DistError, DistNetworkError, DistStoreError, QueueEmptyError, TCPStore

from hpcrl.control import network

MAX_MESSAGE_BYTES = 64 << 20
PART_BYTES = 1 << 20  # the server drops a client at 8 MiB, and serves no other during a push
MAC_BYTES = 32
POLL_BELOW_S = 1.0
POLL_EVERY_S = 0.0005
NAMED_REFUSALS = 100  # a flood must not fill the memory or the disk


class ControlError(RuntimeError):
    """The control plane is unusable or not trustworthy."""


class StoreLost(ControlError):
    """The store does not answer: its process ended or the network failed."""


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Signed together with the queue's name. more: the body continues in the sender's next frame."""

    sender: int
    seq: int
    body: bytes
    more: bool = False


def connect(host: str, port: int, timeout_s: float) -> TCPStore:
    """A new client of the store at host:port. StoreLost if the store does not answer in time."""
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (DistError, RuntimeError) as error:
        raise StoreLost(f"no control store at {host}:{port} within {timeout_s:g} s") from error


def serve(address: str, timeout_s: float) -> TCPStore:
    """A new store on a free port of this process, with a client to it. It listens on `address` only."""
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


def _mac(key: bytes, name: str, frame: bytes) -> bytes:
    return hmac.digest(key, name.encode() + b"\0" + frame, "sha256")


class Sender:
    """Pushes messages to named queues of one store as one sender; safe to use from several threads."""

    def __init__(self, store: TCPStore, key: bytes, sender: int):
        self._store, self._key, self.sender = store, key, sender
        self._seq: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, name: str, message: Any) -> int:
        """Push `message` to queue `name`; returns the sequence number of its last frame, counted from 1 per queue.

        ValueError with the size above 64 MiB; StoreLost if the store is gone.
        """
        body = self._encoder.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"{type(message).__name__} to {name} has {len(body)} bytes, over the limit of {MAX_MESSAGE_BYTES}: "
                "store large data in files and send their paths"
            )
        with self._lock:
            for start in range(0, len(body), PART_BYTES):
                end = start + PART_BYTES
                seq = self._seq[name] + 1
                frame = self._encoder.encode(Frame(self.sender, seq, body[start:end], end < len(body)))
                try:
                    self._store.queue_push(name, _mac(self._key, name, frame) + frame)
                except (DistError, RuntimeError) as error:
                    what = type(message).__name__
                    raise StoreLost(f"the control store is gone: {what} to {name} not sent") from error
                self._seq[name] = seq
            return self._seq[name]


class Inbox:
    """The only reader of a queue. It has its own store client, since a blocked pop blocks all calls of a client."""

    def __init__(self, store: TCPStore, name: str, key: bytes, types: Any):
        self.name, self._key, self._store = name, key, store
        self.refused: list[str] = []
        self.num_refused = 0
        self._decoder = msgspec.msgpack.Decoder(types)
        self._frames = msgspec.msgpack.Decoder(Frame)
        self._last: dict[int, int] = defaultdict(int)
        self._begun: dict[int, bytearray] = defaultdict(bytearray)  # sender -> frames received of an incomplete message

    def get(self, timeout_s: float = 0.0) -> tuple[int, int, Any] | None:
        """The next valid message as (sender, seq, message), None if there is none within timeout_s.

        StoreLost if the store is gone, ControlError on a gap in a sender's sequence.
        """
        deadline = time.monotonic() + timeout_s
        while (raw := self._pop(deadline)) is not None:
            opened = self._open(raw)
            if opened is None:
                continue
            if not isinstance(opened, str):
                return opened
            self._refuse(opened)
            if time.monotonic() > deadline:  # refused messages may never stop
                return None
        return None

    def _pop(self, deadline: float) -> bytes | None:
        # A blocked pop that times out can take seconds to be cancelled (seen with torch 2.13), so short waits poll.
        while True:
            wait = deadline - time.monotonic()
            try:
                if wait > POLL_BELOW_S:
                    self._store.set_timeout(timedelta(seconds=wait))
                    return self._store.queue_pop(self.name)
                return self._store.queue_pop(self.name, block=False)
            except QueueEmptyError:
                if wait <= 0:
                    return None
                time.sleep(min(wait, POLL_EVERY_S))
            except DistNetworkError as error:
                raise StoreLost(f"the control store is gone (queue {self.name})") from error
            except DistStoreError:  # timeout of a blocked pop, up to a millisecond early
                if wait <= POLL_BELOW_S:
                    raise

    def _open(self, raw: bytes) -> tuple[int, int, Any] | str | None:
        """The message that ends with this frame, None if it continues, or why the frame is refused."""
        mac, frame = raw[:MAC_BYTES], raw[MAC_BYTES:]
        if len(raw) > PART_BYTES + 256:
            return f"a message of {len(raw)} bytes, over the limit"
        if not hmac.compare_digest(mac, _mac(self._key, self.name, frame)):
            return f"a message of {len(raw)} bytes with a wrong signature"
        try:
            opened = self._frames.decode(frame)
        except msgspec.MsgspecError as error:
            return f"a signed message that is not a frame: {error}"
        expected = self._last[opened.sender] + 1
        if opened.seq < expected:
            return f"message {opened.seq} of sender {opened.sender}, replayed (expected {expected})"
        if opened.seq > expected:
            raise ControlError(
                f"queue {self.name}: message {opened.seq} of sender {opened.sender} came where {expected} was due; "
                "messages were lost or taken by another reader"
            )
        self._last[opened.sender] = opened.seq
        body: bytes | bytearray = opened.body
        if opened.more or opened.sender in self._begun:
            self._begun[opened.sender] += opened.body
            if opened.more:
                return None
            body = self._begun.pop(opened.sender)
        try:
            return opened.sender, opened.seq, self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            return f"message {opened.seq} of sender {opened.sender} does not fit the schema: {error}"

    def _refuse(self, what: str) -> None:
        self.num_refused += 1
        if self.num_refused <= NAMED_REFUSALS:
            self.refused.append(what)
            print(f"hpcrl control: refused on queue {self.name}: {what}", file=sys.stderr, flush=True)
