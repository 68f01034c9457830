"""Rank 0 sends without waiting for the rank that reads."""

from __future__ import annotations

import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from hpcrl.messaging import nonblocking_sender
from hpcrl.messaging.mailbox_server import Dialer
from hpcrl.messaging.messages import Export
from hpcrl.messaging.nonblocking_sender import NonBlockingSender
from hpcrl.messaging.queues import ReaderLost, Sender, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

KEY, QUEUE = b"k" * 32, "rank/1"
READER = """
from hpcrl.messaging.mailbox_server import MailboxServer
from hpcrl.messaging.messages import Command
from hpcrl.messaging.queues import Inbox
key = b"k" * 32
own = MailboxServer("127.0.0.1", key)
inbox = Inbox(own.queue("rank/1"), "rank/1", key, Command)
print(own.port, flush=True)
while message := inbox.get(60):
    print(message[1], len(message[2].folder), flush=True)
"""
Unreached = queue.Queue[tuple[int, str]]


class Reader:
    """A rank of its own process, and a sender to it that does not wait for more than push_s."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", READER], stdout=subprocess.PIPE, text=True)
        self.store, self.unreached = serve("127.0.0.1", 10), Unreached()
        self.store.set("mailbox/1", f"127.0.0.1:{self.line()}")

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def sender(self, push_s: float = 30.0) -> Sender:
        return Sender(Dialer(self.store, KEY, 0, 10, push_s, lambda *what: self.unreached.put(what)), KEY, 0)


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.process.kill()
    reader.process.communicate()


@pytest.mark.parametrize("connected", [False, True])
def test_a_stopped_rank_blocks_no_sender_and_gets_all_messages_in_order(reader: Reader, connected: bool) -> None:
    sender, sizes = reader.sender(), [16 << 20, 3, 12 << 20, 0, 5 << 20]
    if connected:
        sender.send(QUEUE, Export("first"))
        assert reader.line() == "1 5"
    reader.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    numbers = [sender.send(QUEUE, Export("x" * size)) for size in sizes]
    assert time.monotonic() - began < 20
    reader.process.send_signal(signal.SIGCONT)
    assert [reader.line() for _ in sizes] == [f"{n} {size}" for n, size in zip(numbers, sizes, strict=True)]
    assert sender.send(QUEUE, Export("last")) == numbers[-1] + 1 and reader.line() == f"{numbers[-1] + 1} 4"
    assert reader.unreached.empty()


def test_a_rank_that_accepts_no_data_is_reported_once(reader: Reader) -> None:
    sender = reader.sender(push_s=1.0)
    sender.send(QUEUE, Export("first"))
    assert reader.line() == "1 5"
    reader.process.send_signal(signal.SIGSTOP)
    for _ in range(2):
        sender.send(QUEUE, Export("x" * (16 << 20)))
    why = "queue rank/1: it accepted no data for 1 s"
    assert reader.unreached.get(timeout=30) == (1, why)
    for _ in range(2):
        with pytest.raises(ReaderLost, match="its reader is gone: it accepted no data for 1 s"):
            sender.send(QUEUE, Export("y"))
    assert reader.unreached.empty()


def test_a_burst_over_the_limit_arrives_in_order(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonblocking_sender, "MAX_UNSENT_BYTES", 20 << 20)
    sender, sizes = reader.sender(), [16 << 20, 12 << 20, 3, 12 << 20, 8 << 20, 0]
    sender.send(QUEUE, Export("first"))
    assert reader.line() == "1 5"
    reader.process.send_signal(signal.SIGSTOP)
    numbers = [sender.send(QUEUE, Export("x" * size)) for size in sizes]
    reader.process.send_signal(signal.SIGCONT)
    assert [reader.line() for _ in sizes] == [f"{n} {size}" for n, size in zip(numbers, sizes, strict=True)]
    assert sender.send(QUEUE, Export("last")) == numbers[-1] + 1 and reader.line() == f"{numbers[-1] + 1} 4"
    assert reader.unreached.empty()


def test_entries_over_the_limit_are_encoded_again_in_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of 3, 3, 3, 1 and 3 MiB with a limit of 7 MiB, before the connection is open: the third and the last do
    not fit."""
    monkeypatch.setattr(nonblocking_sender, "MAX_UNSENT_BYTES", 7 << 20)
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    opened, failures, encoded = threading.Event(), list[OSError](), list[int]()

    def connect() -> socket.socket:
        opened.wait()
        return near

    entries = [bytes([number]) * (size << 20) for number, size in enumerate([3, 3, 3, 1, 3])]

    def encode(number: int) -> bytes:
        encoded.append(number)
        return entries[number]

    sender = NonBlockingSender(connect, 30.0, failures.append)
    for number, entry in enumerate(entries):
        sender.send(entry, partial(encode, number))
    opened.set()
    seen, arrived = list[tuple[int, int]](), bytearray()
    with far:
        while len(arrived) < 13 << 20:
            arrived += far.recv(1 << 20)
            seen.append((arrived[-1], len(encoded)))
    assert arrived == b"".join(entries) and not failures
    assert encoded == [2, 4]
    assert {count for last, count in seen if last == 0} == {0}, "none is encoded while the first entry is sent"
    near.close()


def test_a_reader_that_accepts_nothing_of_a_burst_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonblocking_sender, "MAX_UNSENT_BYTES", 1 << 20)
    near, far = socket.socketpair()
    failures = queue.Queue[OSError]()
    sender = NonBlockingSender(lambda: near, 0.3, failures.put)
    with near, far:
        for _ in range(4):
            sender.send(bytes(1 << 20), lambda: bytes(1 << 20))
        assert str(failures.get(timeout=30)) == "it accepted no data for 0.3 s"
        with pytest.raises(TimeoutError):
            sender.send(b"later")
    assert failures.empty()


def test_an_unreachable_rank_is_reported(reader: Reader) -> None:
    reader.process.kill()
    reader.process.wait()
    assert reader.sender().send(QUEUE, Export("x")) == 1
    rank, why = reader.unreached.get(timeout=30)
    assert rank == 1 and why.startswith("queue rank/1: ") and "Connection refused" in why
