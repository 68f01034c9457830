"""Only connections to a host that no longer answers end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hpcrl.messaging.dead_host_watch import DeadHostWatch
from hpcrl.messaging.mailbox_server import MailboxServer, SenderEnded, connect
from hpcrl.messaging.messages import Event, Export, Joined
from hpcrl.messaging.queues import Inbox, Sender
from tests.e2e.cutting_off import cut_off

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

KEY, DEADLINE_S = b"k" * 32, 3.0
SLACK_S = 15.0  # for a machine whose cores are busy
OTHER = """
import sys, time
from hpcrl.messaging.mailbox_server import MailboxServer, connect
from hpcrl.messaging.messages import Joined
from hpcrl.messaging.queues import Sender
key, own = b"k" * 32, MailboxServer("127.0.0.1", b"k" * 32)
own.queue("rank/1")
sender = Sender(lambda queue: connect("127.0.0.1", int(sys.argv[1]), queue, key, 1, 30, 30), key, 1)
sender.send("controller", Joined("x", 1))
print(own.port, flush=True)
time.sleep(100)
"""


@pytest.fixture
def mailbox_server() -> Iterator[MailboxServer]:
    mailbox_server = MailboxServer("127.0.0.1", KEY)
    mailbox_server.queue("controller")
    watch = DeadHostWatch(DEADLINE_S)
    yield mailbox_server
    watch.stop()
    mailbox_server.close()


@pytest.fixture
def other(mailbox_server: MailboxServer) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has said Joined, and the port of its own mailbox server."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(mailbox_server.port)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.communicate()


def test_connections_to_a_silent_host_end(
    mailbox_server: MailboxServer, other: tuple[subprocess.Popen[str], int]
) -> None:
    inbox = Inbox(mailbox_server.queue("controller"), "controller", KEY, Event)
    assert inbox.get(20) == (1, 1, Joined("x", 1))
    time.sleep(DEADLINE_S / 4)  # the watch has seen the connection
    assert cut_off(other[0].pid) >= 2
    began = time.monotonic()
    assert inbox.get(DEADLINE_S + SLACK_S) is None
    assert inbox.take_ended() == [SenderEnded(1, "vanished", "its host does not answer")]
    assert time.monotonic() - began < DEADLINE_S + SLACK_S


def test_a_message_to_a_lost_host_does_not_wait_longer(other: tuple[subprocess.Popen[str], int]) -> None:
    """The kernel would retransmit it for a quarter of an hour, while the sender waits for buffer space."""
    sender = Sender(lambda queue: connect("127.0.0.1", other[1], queue, KEY, 0, 30, 60), KEY, 0)
    sender.send("rank/1", Export("x"))
    cut_off(other[0].pid)
    began = time.monotonic()
    with pytest.raises(Exception, match="its reader is gone"):
        for _ in range(20):
            sender.send("rank/1", Export("x" * (16 << 20)))
    assert time.monotonic() - began < DEADLINE_S + SLACK_S


@pytest.mark.parametrize("full", [False, True], ids=["idle", "reads nothing"])
def test_a_stopped_process_does_not_count_as_a_lost_host(full: bool) -> None:
    """Its kernel answers: a suspended job, or a rank that computes, loses no connection."""
    watch = DeadHostWatch(DEADLINE_S / 3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"import socket, time; c = socket.create_connection(('127.0.0.1', {server.getsockname()[1]})); "
        process = subprocess.Popen([sys.executable, "-c", program + "c.send(b'.'); time.sleep(100)"])
        try:
            connection, _ = server.accept()
            with connection:
                assert connection.recv(1) == b"."
                os.kill(process.pid, signal.SIGSTOP)
                connection.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while full:
                        connection.send(bytes(1 << 20))
                time.sleep(DEADLINE_S)
                with pytest.raises(BlockingIOError):
                    connection.recv(1)
        finally:
            process.kill()
            process.wait()
            watch.stop()
