"""Rank 0 sends without waiting for the rank that reads."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hpcrl.messaging import nonblocking_sender
from hpcrl.messaging.mailbox_server import Dialer
from hpcrl.messaging.messages import Export
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
    assert time.monotonic() - began < 5
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
    assert reader.unreached.get(timeout=10) == (1, why)
    for _ in range(2):
        with pytest.raises(ReaderLost, match="its reader is gone: it accepted no data for 1 s"):
            sender.send(QUEUE, Export("y"))
    assert reader.unreached.empty()


def test_unsent_bytes_over_the_limit_are_an_error(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonblocking_sender, "MAX_UNSENT_BYTES", 40 << 20)
    reader.process.send_signal(signal.SIGSTOP)
    sender = reader.sender()
    with pytest.raises(ReaderLost, match=r"its reader is gone: \d+ unsent bytes, over the limit of 41943040"):
        for _ in range(4):
            sender.send(QUEUE, Export("x" * (16 << 20)))


def test_an_unreachable_rank_is_reported(reader: Reader) -> None:
    reader.process.kill()
    reader.process.wait()
    assert reader.sender().send(QUEUE, Export("x")) == 1
    rank, why = reader.unreached.get(timeout=10)
    assert rank == 1 and why.startswith("queue rank/1: ") and "Connection refused" in why
