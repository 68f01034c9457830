"""Control messages through a mailbox server, under every attack at its port."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.messaging import mailbox_server as module
from hpcrl.messaging import messages as m
from hpcrl.messaging import queues
from hpcrl.messaging.mailbox_server import Arrival, Arrivals, MailboxServer, Push, SenderEnded, connect
from hpcrl.messaging.queues import Inbox, ReaderLost, Sender, StoreLost
from hpcrl.spec.media import Medium
from hpcrl.system.exit_codes import ExitCode

pytestmark = pytest.mark.usefixtures("console")

KEY, QUEUE = b"k" * 32, "rank/1"
NO_QUEUE = b"there is no such queue"
HOST = """
from datetime import timedelta; import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
store.set("hpcrl/world", "x")
print(store.port, flush=True)
sys.stdin.read()
"""
WATCHED = """
import sys, time
from hpcrl.messaging.queues import connect
from hpcrl.messaging.watch import StoreWatch
from hpcrl.system import log
log.start("rank 7", file=log.STDERR)
watch = StoreWatch(connect("127.0.0.1", int(sys.argv[1]), 20), lambda: "DecodeChunk #3", 3.0)
print("up", flush=True)
if sys.argv[2] == "stop": watch.stop()
sys.stdin.read()
"""

MOVE = m.Move(1, 2, [5, 9], [7, 3])
SCORED = m.ScoredSample(5, 1.0, 0.5, "timeout", {"length": 3.0})
COMMANDS: list[Any] = [
    m.BuildRole("trainer", [1, 2]),
    m.BuildGroup("fabric", [0, 1, 2], 3),
    m.Profile(3, True),
    m.Shutdown(),
    m.Admit(
        [m.PromptPayload(1, "maths", b"\x01\0", b"{}", (Medium("image", bytes(3), 1, 1, 0, 1),))],
        [(5, 6)],
        m.Sampling(8, 0.6, 0.9, 0, 0.1, ["\n", "é"]),
    ),
    m.DecodeChunk(16, [1], [2]),
    m.AbortSamples([1, 2]),
    m.Rescore([1], [2]),
    m.ScoreGroup([1, 2]),
    m.DropAwaiting([3]),
    m.EndEpisodes(2),
    m.DropSamples([]),
    m.ReadTexts([2**62]),
    m.ReadEpisodes([2**62]),
    m.ReadLastObservation([2**62]),
    m.TransferRollouts(3, "fabric", [MOVE], ["token_ids"], {"rewards": b"\0" * 8, "scores": b"\xff" * 8}, True),
    m.LoadRows(1, [0, 1], "val", [1, 0], 9),
    m.MixRows(1, [0, 1]),
    m.TakePairs(-3, 1, [2, 0]),
    m.LoadRollouts(1, "runs/a", 3, [7 << 24]),
    m.SavePending("runs/a/checkpoints/step_000002", [7 << 24]),
    m.LoadPending("runs/a/checkpoints/step_000002", ["pending_rank0002.safetensors"], [7 << 24]),
    m.Logprobs(1, "reference", "ref_logprobs", [[0], [1, 2]]),
    m.Teach(1, {"teacher_logprobs": 0}, [[0], [1, 2]]),
    m.Teach(1, {"teacher_logprobs": 0}, [[0]], 1, {7: b"\0\1\0\0"}),
    m.SendTokens(1, "fabric", "ref_logprobs", [MOVE]),
    m.SendTokens(1, "fabric", "returns", [MOVE], "critic"),
    m.StoreLogprobs(1, "ref_logprobs", "cache/x"),
    m.ReadLogprobs(1, "ref_logprobs", "cache/x"),
    m.ReleaseReference(),
    m.Values(1, [[0], [1, 2]]),
    m.SetSampleWeights(1, [(7 << 24, 0.5)]),
    m.Advantages(1),
    m.TrainStep(1, [[0], []], 12.5, 2.0),
    m.LossStats(1, [[0], [1, 2]], 12.5, 2.0, {"kl": 0.5}),
    m.TrainCritic(1, [[0], []], 12.5, 2.0),
    m.DropBatch(1),
    m.Ask("witness", "likelihood", {"batch": 1}),
    m.BroadcastBatch(1, "trainer", "ref_logprobs"),
    m.WriteRollouts(1, "rollouts/step_000001", {"step": 1, "lr": 0.5, "name": "x"}),
    m.UpdateWeights(4, [0, 2]),
    m.SaveState("checkpoints/x"),
    m.FinishSave(10.0),
    m.AbandonSave(),
    m.CheckFiles("checkpoints/x", [("a", 3, "abc")]),
    m.FinishCheck(10.0),
    m.LoadState("checkpoints/x"),
    m.LoadReference("reference/x"),
    m.LoadTeacher("teacher/x"),
    m.LoadTeacherHead("teacher/x"),
    m.Export("hf"),
    m.ExportCritic("hf_critic"),
]
EVENTS: list[Any] = [
    m.Joined("node1", 77),
    m.Done(4, {"loss": (1.0, 2.0, 0.0, 1.0)}, [("a", 3, "00")], ["text"]),
    m.Failed(4, "DecodeChunk", "ValueError: no"),
    m.DecodeChunkDone(4, [m.Ended(5, 9, 4, "stop")], [], 16, 0.1),
    m.Scored([SCORED]),
    m.AwaitGroup([5, 6]),
    m.Observed(5, True, SCORED),
    m.Lost(2, "was killed"),
]
POSTS: list[Any] = [
    m.Post([m.Response(5, "maths", "4", b"{}", "stop"), m.EnvObservation(5, b"\0\0\0\0", b"[]")]),
    m.Post([m.Turn(5, "maths", "", b"{}", "stop", 2, 3, 4, starts_episode=True)]),
]


@pytest.fixture
def mailbox_server() -> Iterator[MailboxServer]:
    mailbox_server = MailboxServer("127.0.0.1", KEY)
    mailbox_server.queue(QUEUE)
    yield mailbox_server
    mailbox_server.close()


@pytest.fixture
def push(mailbox_server: MailboxServer) -> Push:
    """The connection of sender 0."""
    return connect("127.0.0.1", mailbox_server.port, QUEUE, KEY, 0, 30, 30)


@pytest.fixture
def inbox(mailbox_server: MailboxServer) -> Inbox:
    return Inbox(mailbox_server.queue(QUEUE), QUEUE, KEY, m.Command)


def sender_to(mailbox_server: MailboxServer, number: int = 0, key: bytes = KEY) -> Sender:
    return Sender(lambda queue: connect("127.0.0.1", mailbox_server.port, queue, KEY, number, 30, 30), key, number)


class Recorded(Sender):
    """Records messages instead of pushing them."""

    def __init__(self, number: int = 0, key: bytes = KEY, sent: int = 0):
        """sent: the number of earlier messages to QUEUE."""
        self.pushed: list[bytes] = []
        super().__init__(lambda queue: lambda entry, encode=None: self.pushed.append(entry), key, number)
        for _ in range(sent):
            self.raw(m.Shutdown())

    def raw(self, message: Any, queue: str = QUEUE) -> bytes:
        """The bytes that are pushed for a message."""
        self.send(queue, message)
        return self.pushed.pop()


def raw_of(message: Any, *, key: bytes = KEY, queue: str = QUEUE) -> bytes:
    return Recorded(key=key).raw(message, queue)


def test_samples_cover_every_message() -> None:
    assert {type(c) for c in COMMANDS} == set(get_args(m.Command))
    assert {type(e) for e in EVENTS} == set(get_args(m.Event))


@pytest.mark.parametrize(
    ("samples", "types"),
    [(COMMANDS, m.Command), (EVENTS, m.Event), (POSTS, m.Post)],
    ids=["commands", "events", "posts"],
)
def test_every_message_arrives_as_it_was_sent(mailbox_server: MailboxServer, samples: list[Any], types: Any) -> None:
    sender, inbox = sender_to(mailbox_server, 3), Inbox(mailbox_server.queue(QUEUE), QUEUE, KEY, types)
    assert [sender.send(QUEUE, message) for message in samples] == list(range(1, len(samples) + 1))
    for number, message in enumerate(samples, 1):
        assert inbox.get(20) == (3, number, message)
    assert inbox.get() is None
    assert inbox.refused == []


def test_each_sender_and_queue_has_its_own_numbering(mailbox_server: MailboxServer, inbox: Inbox) -> None:
    other = Inbox(mailbox_server.queue("rank/2"), "rank/2", KEY, m.Command)
    first, second = sender_to(mailbox_server, 1), sender_to(mailbox_server, -2)
    got = []
    for sender in (first, second, second, first):
        sender.send(QUEUE, m.Shutdown())
        got.append(inbox.get(20)[:2])  # between connections there is no order
        sender.send("rank/2", m.Shutdown())
        assert other.get(20)[:2] == got[-1]
    assert got == [(1, 1), (-2, 1), (-2, 2), (1, 2)]


def test_threads_share_a_sender(mailbox_server: MailboxServer, inbox: Inbox) -> None:
    sender = sender_to(mailbox_server, 1)
    threads = [threading.Thread(target=lambda: [sender.send(QUEUE, m.Shutdown()) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert [inbox.get(20)[1] for _ in range(200)] == list(range(1, 201))


# -- refused -----------------------------------------------------------------------------------------------------


def refuse(push: Push, inbox: Inbox, raw: bytes, why: str, capfd: pytest.CaptureFixture[str], sent: int = 0) -> None:
    """`raw` is refused and named, and the valid message after it arrives. sent: messages of sender 0 that count."""
    push(raw)
    push(Recorded(sent=sent).raw(m.Shutdown()))
    assert inbox.get(20) == (0, sent + 1, m.Shutdown())
    assert len(inbox.refused) == 1
    assert why in inbox.refused[0]
    assert f"refused on queue {QUEUE}: {inbox.refused[0]}" in capfd.readouterr().out


def test_a_forged_message_is_refused(push: Push, inbox: Inbox, capfd: pytest.CaptureFixture[str]) -> None:
    refuse(push, inbox, raw_of(m.Export("hf"), key=b"j" * 32), "wrong signature", capfd)


@pytest.mark.parametrize("raw", [b"", b"x", b"\0" * 32, os.urandom(500)], ids=["empty", "short", "zeros", "noise"])
def test_random_bytes_are_refused(push: Push, inbox: Inbox, raw: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    refuse(push, inbox, raw, f"a message of {len(raw)} bytes with a wrong signature", capfd)


def test_a_replayed_message_is_refused(push: Push, inbox: Inbox, capfd: pytest.CaptureFixture[str]) -> None:
    raw = raw_of(m.Export("hf"))
    push(raw)
    assert inbox.get(20) == (0, 1, m.Export("hf"))
    refuse(push, inbox, raw, "message 1 of sender 0, replayed (expected 2)", capfd, sent=1)


def test_a_replay_from_another_queue_is_refused(push: Push, inbox: Inbox, capfd: pytest.CaptureFixture[str]) -> None:
    refuse(push, inbox, raw_of(m.Shutdown(), queue="rank/2"), "wrong signature", capfd)


@pytest.mark.parametrize("sent", [[2, 1], [1, 3], [1, 3, 2]], ids=["out of order", "lost", "lost and late"])
def test_a_gap_ends_only_the_stream_of_its_sender(mailbox_server: MailboxServer, inbox: Inbox, sent: list[int]) -> None:
    recorded, other = Recorded(4), sender_to(mailbox_server, 5)
    raws = {number: recorded.raw(m.Advantages(number)) for number in range(1, 4)}
    broken = connect("127.0.0.1", mailbox_server.port, QUEUE, KEY, 4, 30, 30)
    for number in sent:
        broken(raws[number])
    wait_for(lambda: mailbox_server.queue(QUEUE).qsize() == len(sent))
    other.send(QUEUE, m.Advantages(7))
    got, ended, deadline = [], [], time.monotonic() + 20
    while (5, 1, m.Advantages(7)) not in got:  # the last one sent
        assert time.monotonic() < deadline
        got += [message] if (message := inbox.get(0.2)) is not None else []
        ended += inbox.take_ended()
    before = [number for number in sent if sent.index(number) == number - 1]
    assert got == [*((4, number, m.Advantages(number)) for number in before), (5, 1, m.Advantages(7))]
    gap = f"message {sent[len(before)]} of sender 4 came where {len(before) + 1} was expected; messages were lost"
    assert ended == [SenderEnded(4, "gap", f"queue rank/1: {gap}")]


def test_a_second_process_with_a_ranks_number_is_refused_and_changes_nothing(
    mailbox_server: MailboxServer, inbox: Inbox
) -> None:
    """Before, it was refused as a replay only up to the number that the first process had reached."""
    first, second = sender_to(mailbox_server, 4), sender_to(mailbox_server, 4)
    for step in range(3):
        first.send(QUEUE, m.Advantages(step))
    for _ in range(5):
        with pytest.raises(ReaderLost, match=r"refused sender 4 of queue rank/1: .* two processes have the same rank"):
            second.send(QUEUE, m.Export("stolen"))
    first.send(QUEUE, m.Advantages(3))
    assert [inbox.get(20) for _ in range(4)] == [(4, step + 1, m.Advantages(step)) for step in range(4)]
    assert inbox.get(0.1) is None and inbox.num_refused == 0 and inbox.take_ended() == []


def test_a_sender_cannot_impersonate_another(push: Push, inbox: Inbox, capfd: pytest.CaptureFixture[str]) -> None:
    refuse(
        push,
        inbox,
        Recorded(4).raw(m.Export("hf")),
        "message 1, signed as sender 4, on the connection of sender 0",
        capfd,
    )


def test_a_wrong_key_and_a_wrong_queue_are_refused_with_the_reason(mailbox_server: MailboxServer) -> None:
    for queue, key, why in ((QUEUE, b"j" * 32, "wrong key for this run"), ("rank/9", KEY, "no such queue")):
        with pytest.raises(ConnectionRefusedError, match=f"refused sender 3 of queue {queue}: .*{why}"):
            connect("127.0.0.1", mailbox_server.port, queue, key, 3, 30, 30)


def test_the_end_of_a_sender_is_reported_after_its_last_message(mailbox_server: MailboxServer, inbox: Inbox) -> None:
    sender = sender_to(mailbox_server, 4)
    sender.send(QUEUE, m.Shutdown())
    del sender  # closes its connection
    assert inbox.get(20) == (4, 1, m.Shutdown())
    assert inbox.get(20) is None
    assert inbox.take_ended() == [SenderEnded(4, "closed", "its connection has ended")]


def test_a_signed_message_without_frame_is_refused(push: Push, inbox: Inbox, capfd: pytest.CaptureFixture[str]) -> None:
    refuse(push, inbox, queues.sign(KEY, QUEUE, b"\x93\x01\x02"), "a signed message that is not a frame", capfd)


@pytest.mark.parametrize(
    "body",
    [
        m.Joined("node1", 7),  # an event in a rank's inbox
        ["Export", 5],  # wrong type
        ["Export"],  # a field is missing
        ["Export", "hf", "more"],  # a field too many
        ["Shutdown", "hf"],  # unknown
        {"type": "Export", "folder": "hf"},
    ],
    ids=["event", "type", "missing", "extra", "unknown", "map"],
)
def test_a_wrong_schema_is_refused(push: Push, inbox: Inbox, body: Any, capfd: pytest.CaptureFixture[str]) -> None:
    refuse(push, inbox, raw_of(body), "message 1 of sender 0 does not fit the schema", capfd, sent=1)


def test_the_sender_refuses_too_large_messages(mailbox_server: MailboxServer, inbox: Inbox) -> None:
    sender = sender_to(mailbox_server)
    with pytest.raises(ValueError, match=r"Done to rank/1 has 671088\d\d bytes, over the limit of 67108864: store "):
        sender.send(QUEUE, m.Done(1, texts=["x" * (64 << 20)]))
    assert inbox.get() is None
    assert sender.send(QUEUE, m.Shutdown()) == 1  # the refused one used no number
    assert inbox.get(20) == (0, 1, m.Shutdown())


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [module.RECEIVE_BYTES, 5 << 20, queues.MAX_MESSAGE_BYTES])
def test_a_large_message_arrives_whole(mailbox_server: MailboxServer, inbox: Inbox, num_bytes: int) -> None:
    message = m.Export("x" * (num_bytes - 13))  # 13: the list, the tag and the string's head
    sender = sender_to(mailbox_server)
    assert sender.send(QUEUE, message) == 1
    assert sender.send(QUEUE, m.Shutdown()) == 2
    assert inbox.get(20) == (0, 1, message)
    assert inbox.get(20) == (0, 2, m.Shutdown())
    assert inbox.refused == []


def test_a_flood_is_counted_and_blocks_nobody(push: Push, mailbox_server: MailboxServer, inbox: Inbox) -> None:
    for _ in range(queues.NAMED_REFUSALS + 50):
        push(b"flood")
    push(raw_of(m.Shutdown()))
    wait_for(lambda: mailbox_server.queue(QUEUE).qsize() == queues.NAMED_REFUSALS + 51)
    assert inbox.get(0.0) == (0, 1, m.Shutdown()), "a reader who does not wait passes over all that is there"
    assert inbox.num_refused == queues.NAMED_REFUSALS + 50
    assert len(inbox.refused) == queues.NAMED_REFUSALS


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


TAMPERING = st.one_of(
    st.just(("pass",)),
    st.just(("drop",)),
    st.tuples(st.just("flip"), st.integers(0, 10**6), st.integers(0, 7)),
    st.tuples(st.just("cut"), st.integers(1, 10**6)),
    st.tuples(st.just("append"), st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("replay"), st.integers(0, 10)),
    st.tuples(st.just("noise"), st.binary(max_size=80)),
)


def tamper(genuine: list[bytes], number: int, kind: str, *how: Any) -> list[tuple[bytes, int | None]]:
    """The messages pushed in place of genuine[number], each with its real number or None."""
    raw = genuine[number]
    match kind:
        case "drop":
            return []
        case "flip":
            place = how[0] % len(raw)
            return [(raw[:place] + bytes([raw[place] ^ (1 << how[1])]) + raw[place + 1 :], None)]
        case "cut":
            return [(raw[: -(1 + how[0] % len(raw))], None)]
        case "append":
            return [(raw + how[0], None)]
        case "replay":
            return [(raw, number), (genuine[how[0] % (number + 1)], how[0] % (number + 1))]
        case "noise":
            return [(how[0], None), (raw, number)]
    return [(raw, number)]


@pytest.mark.slow
@pytest.mark.timeout(30)
def test_signals_do_not_prolong_a_wait() -> None:
    """Signals while a wait times out; queue.SimpleQueue would wait forever after some hundreds."""
    mailbox_server = MailboxServer("127.0.0.1", KEY)
    inbox = Inbox(mailbox_server.queue(QUEUE), QUEUE, KEY, m.Command)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    rng, begun, waits = random.Random(0), time.monotonic(), 0

    def signals() -> None:
        while time.monotonic() < begun + 2:
            time.sleep(rng.uniform(0, 0.0006))
            os.kill(os.getpid(), signal.SIGUSR1)

    sender = threading.Thread(target=signals)
    sender.start()
    try:
        while sender.is_alive():
            assert inbox.get(0.0005) is None
            waits += 1
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
        mailbox_server.close()
    assert waits > 500


@settings(max_examples=100, deadline=None)
@given(tampering=st.lists(TAMPERING, min_size=1, max_size=8))
def test_tampering_never_yields_a_message_that_was_not_next(tampering: list[tuple[Any, ...]]) -> None:
    entries: Arrivals = Queue()
    sender, inbox = Recorded(), Inbox(entries, QUEUE, KEY, m.Command)
    genuine = [sender.raw(m.Advantages(n)) for n in range(len(tampering))]
    pushed = [push for number, how in enumerate(tampering) for push in tamper(genuine, number, *how)]
    accepted, refused, gap = 0, 0, False
    for raw, number in pushed:
        entries.put(Arrival(0, raw))
        if gap or (number is not None and number > accepted):
            gap = True
        elif number == accepted:
            accepted += 1
        else:
            refused += 1
    got, ended = [], []
    while (message := inbox.get()) is not None or not entries.empty():
        got += [message[2]] if message is not None else []
        ended += inbox.take_ended()
    assert got == [m.Advantages(number) for number in range(accepted)]
    assert [end.how for end in ended + inbox.take_ended()] == ["gap"] * gap
    assert gap or inbox.num_refused == refused


# -- waiting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [0.0, 0.3])
def test_reading_an_empty_queue_takes_exactly_the_timeout(inbox: Inbox, timeout_s: float) -> None:
    start = time.monotonic()
    assert inbox.get(timeout_s) is None
    assert timeout_s <= time.monotonic() - start < timeout_s + 10


def test_a_blocked_get_wakes_up_when_a_message_arrives(inbox: Inbox, push: Push) -> None:
    threading.Timer(0.3, lambda: push(raw_of(m.Shutdown()))).start()
    start = time.monotonic()
    assert inbox.get(60) == (0, 1, m.Shutdown())
    assert time.monotonic() - start < 30


def test_the_wakeup_event_covers_every_queue(mailbox_server: MailboxServer, push: Push) -> None:
    assert not mailbox_server.wakeup.is_set()
    mailbox_server.queue("mail/1")
    for there in (push, connect("127.0.0.1", mailbox_server.port, "mail/1", KEY, 0, 30, 30)):
        there(b"entry")
        assert mailbox_server.wakeup.wait(20)
        mailbox_server.wakeup.clear()
    assert mailbox_server.queue(QUEUE).get() == mailbox_server.queue("mail/1").get() == Arrival(0, b"entry")


# -- a reader that is gone ---------------------------------------------------------------------------------------


def test_a_lost_reader_is_named_and_not_retried(mailbox_server: MailboxServer, inbox: Inbox) -> None:
    sender = sender_to(mailbox_server)
    sender.send(QUEUE, m.Shutdown())
    assert inbox.get(20) is not None
    mailbox_server.close()
    with pytest.raises(ReaderLost, match="Shutdown to rank/1 was not sent, its reader is gone: ") as first:
        for _ in range(20):  # the first ones may still go into the socket
            sender.send(QUEUE, m.Shutdown())
            time.sleep(0.05)
    start = time.monotonic()
    for late in (sender, sender_to(mailbox_server)):  # a sender that was never connected
        for _ in range(3):
            with pytest.raises(ReaderLost, match="its reader is gone"):
                late.send(QUEUE, m.Shutdown())
    assert time.monotonic() - start < 10, "a sender that waits for the timeout would seem lost itself"
    with pytest.raises(ReaderLost) as last:
        sender.send(QUEUE, m.Shutdown())
    assert last.value.seq > first.value.seq, "each has its own number"


@pytest.mark.slow
@pytest.mark.parametrize("greets", [False, True], ids=["says nothing", "reads nothing"])
def test_a_hanging_reader_costs_its_timeout_only_once(greets: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as held:
        port = server.getsockname()[1]

        def greet() -> None:
            connection, _ = server.accept()
            held.enter_context(connection).sendall(bytes(module.DRAWN_BYTES))

        if greets:
            threading.Thread(target=greet).start()
        sender = Sender(lambda queue: connect("127.0.0.1", port, queue, KEY, 0, 20, 2.0), KEY, 0)
        with pytest.raises(ReaderLost, match="timed out"):
            sender.send(QUEUE, m.Export("x" * (48 << 20)))
        start = time.monotonic()
        for _ in range(9):
            with pytest.raises(ReaderLost, match="timed out"):
                sender.send(QUEUE, m.Export("x"))
        assert time.monotonic() - start < 16


def test_a_port_without_a_mailbox_server_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def hang_up() -> None:
            server.accept()[0].close()

        threading.Thread(target=hang_up).start()
        with pytest.raises(OSError, match=f"127.0.0.1:{port} is not a mailbox server of this run"):
            connect("127.0.0.1", port, QUEUE, KEY, 0, 20, 5)


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:port", b"\xff:1"])
def test_a_wrong_address_in_the_store_is_named(address: str) -> None:
    store = queues.serve("127.0.0.1", 5)
    store.set("mailbox/7", address)
    with pytest.raises(
        ReaderLost, match=r"Shutdown to rank/7 was not sent, .* the store has a wrong address of rank 7"
    ):
        Sender(module.Dialer(store, KEY, 0, 5, 5), KEY, 0).send("rank/7", m.Shutdown())


def test_a_rank_without_a_mailbox_server_is_named() -> None:
    store = queues.serve("127.0.0.1", 0.3)
    sender = Sender(module.Dialer(store, KEY, 0, 0.3, 0.3), KEY, 0)
    with pytest.raises(ReaderLost, match=r"Shutdown to mail/99 was not sent, .*: the store has no address of rank 99"):
        sender.send("mail/99", m.Shutdown())


def test_a_closed_mailbox_server_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    mailbox_server = MailboxServer("127.0.0.1", KEY)
    (own,) = set(threading.enumerate()) - before
    mailbox_server.close()
    mailbox_server.close()  # harmless
    own.join(20)
    assert not own.is_alive()
    with pytest.raises(ConnectionRefusedError):
        connect("127.0.0.1", mailbox_server.port, QUEUE, KEY, 0, 5, 5)


def start_host() -> tuple[subprocess.Popen[str], int]:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    return host, int(host.stdout.readline())


@pytest.fixture(scope="module")
def host() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that hosts a store, and its port."""
    process, port = start_host()
    yield process, port
    process.kill()
    process.wait()


def watched(port: int, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WATCHED, str(port), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_every_process_notices_a_lost_store(host: tuple[subprocess.Popen[str], int]) -> None:
    process, port = host
    left, stopped = watched(port, "go"), watched(port, "stop")
    for child in (left, stopped):
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
    process.send_signal(signal.SIGSTOP)  # silent, but its connections stand
    assert left.wait(60) == ExitCode.STORE_LOST
    assert left.stderr is not None
    assert " rank 7 ERROR the control store has not answered for 3 s (while in DecodeChunk #3)" in left.stderr.read()
    process.send_signal(signal.SIGCONT)
    late = watched(port, "go")
    assert late.stdout is not None and late.stderr is not None
    assert late.stdout.readline() == "up\n"
    process.kill()
    process.wait()
    assert late.wait(60) == ExitCode.STORE_LOST
    assert " rank 7 ERROR the control store is gone (while in DecodeChunk #3)" in late.stderr.read()
    start = time.monotonic()
    with pytest.raises(StoreLost, match=f"no control store at 127.0.0.1:{port} within 0.5 s"):
        queues.connect("127.0.0.1", port, 0.5)
    assert time.monotonic() - start < 10
    assert stopped.poll() is None  # it knows that the store may end
    stopped.kill()
    for child in (left, late, stopped):
        child.communicate()


# -- the protection of a queue, as documented in docs/control_plane.md --------------------------------------


def hello(
    connection: socket.socket, queue: str = QUEUE, key: bytes = KEY, drawn: bytes | None = None, number: str = "7"
) -> bytes:
    """A sender's greeting; drawn: it answers this number and not the connection's."""
    own = connection.recv(module.DRAWN_BYTES, socket.MSG_WAITALL)
    who = f"{number} {queue}".encode()
    return long(module.mac(key, (drawn or own) + who) + who)


def long(entry: bytes) -> bytes:
    """A length-prefixed entry."""
    return len(entry).to_bytes(4, "little") + entry


@pytest.fixture
def stranger(mailbox_server: MailboxServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", mailbox_server.port), 5) as connection:
        yield connection


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"\0",
        os.urandom(1000),
        b"\xff" * 100,
        bytes(100),
        b"GET / HTTP/1.1\r\n\r\n",
        long(QUEUE.encode()) + long(b"x"),
    ],
    ids=["nothing", "a byte", "random", "ones", "zeros", "http", "a queue's name"],
)
def test_random_bytes_at_the_port_have_no_effect(
    mailbox_server: MailboxServer, push: Push, inbox: Inbox, stranger: socket.socket, noise: bytes
) -> None:
    stranger.sendall(noise)
    with socket.create_connection(("127.0.0.1", mailbox_server.port)) as ends:
        ends.sendall(noise)
    push(raw_of(m.Shutdown()))
    assert inbox.get(20) == (0, 1, m.Shutdown())
    assert inbox.num_refused == 0


@pytest.mark.parametrize(
    ("queue", "key", "drawn", "number"),
    [
        (QUEUE, b"j" * 32, None, "7"),
        ("rank/2", KEY, None, "7"),
        (QUEUE, KEY, bytes(module.DRAWN_BYTES), "7"),
        (QUEUE, KEY, None, "--5"),
    ],
    ids=["another key", "a queue of nobody", "an old answer", "no number"],
)
def test_nothing_can_be_added_without_the_key(
    push: Push, inbox: Inbox, stranger: socket.socket, queue: str, key: bytes, drawn: bytes | None, number: str
) -> None:
    with contextlib.suppress(ConnectionError):
        stranger.sendall(hello(stranger, queue, key, drawn, number) + long(raw_of(m.Shutdown())))
        assert stranger.recv(200, socket.MSG_WAITALL)[1:] in (b"wrong key for this run", NO_QUEUE)
    push(raw_of(m.Shutdown()))
    assert inbox.get(20) == (0, 1, m.Shutdown())
    assert inbox.get(0.1) is None and inbox.num_refused == 0


@pytest.mark.parametrize("knows_the_key", [False, True])
def test_a_too_long_entry_closes_its_connection_at_once(
    push: Push, inbox: Inbox, stranger: socket.socket, knows_the_key: bool
) -> None:
    """Its memory is not even allocated."""
    said, most = hello(stranger), module.MAX_ENTRY_BYTES if knows_the_key else module.MAX_HELLO_BYTES
    stranger.sendall((said if knows_the_key else b"") + (most + 1).to_bytes(4, "little"))
    assert stranger.recv(2, socket.MSG_WAITALL) == (b"\0" if knows_the_key else b""), "the connection ends"
    push(raw_of(m.Shutdown()))
    assert (inbox.get(20) or inbox.get(20)) == (0, 1, m.Shutdown()), "behind the end of the other"


def test_a_sender_that_stops_within_a_message_blocks_nobody(push: Push, inbox: Inbox, stranger: socket.socket) -> None:
    said, entry = hello(stranger), long(Recorded(7).raw(m.Export("x" * 1000)))
    for piece in (said[:3], said[3:40], said[40:], entry[:2], entry[2:500]):
        stranger.sendall(piece)
        time.sleep(0.02)
    push(raw_of(m.Shutdown()))
    assert inbox.get(20) == (0, 1, m.Shutdown())
    stranger.sendall(entry[500:])
    assert inbox.get(20) == (7, 1, m.Export("x" * 1000))


def test_too_many_connections_only_delay_messages(mailbox_server: MailboxServer, inbox: Inbox) -> None:
    """As long as no file can be opened, the mailbox server waits; then it accepts the pending connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as late:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # whatever other threads of this process close
        try:
            late.settimeout(0.3)
            late.connect(("127.0.0.1", mailbox_server.port))
            with pytest.raises(TimeoutError):
                late.recv(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        late.settimeout(20)
        late.sendall(hello(late) + long(Recorded(7).raw(m.Shutdown())))
        assert inbox.get(20) == (7, 1, m.Shutdown())


def test_no_message_contains_the_key() -> None:
    raw = raw_of(m.Export("hf"))
    assert KEY not in raw
    assert msgspec.msgpack.decode(raw[module.MAC_BYTES :]) == [0, 1, msgspec.msgpack.encode(["Export", "hf"])]
