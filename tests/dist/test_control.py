"""Control messages over a real TCPStore, against everything that somebody at its port could do to them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import QueueEmptyError, TCPStore

from hpcrl.control import messages as m
from hpcrl.control import queues
from hpcrl.control.queues import PART_BYTES, ControlError, Inbox, Sender, StoreLost
from hpcrl.exitcodes import ExitCode

KEY, QUEUE = b"k" * 32, "rank/1"
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
from hpcrl.control.queues import connect
from hpcrl.control.watch import StoreWatch
watch = StoreWatch(connect("127.0.0.1", int(sys.argv[1]), 20), "rank 7 on here", lambda: "Burst #3", 1.0)
print("up", flush=True)
if sys.argv[2] == "stop": watch.stop()
time.sleep(8 if sys.argv[2] == "stay" else 0)
sys.stdin.read()
"""

MOVE = m.Move(1, 2, [5, 9], [7, 3])
SCORED = m.ScoredSample(5, 1.0, 0.5, "timeout", {"length": 3.0})
COMMANDS: list[Any] = [
    m.BuildRole("trainer", [1, 2]),
    m.BuildGroup("fabric", [0, 1, 2], 3),
    m.Leave(),
    m.Admit([m.PromptPayload(1, "maths", b"\x01\0", b"{}")], [(5, 6)], m.Sampling(8, 0.6, 0.9, 0, 0.1, ["\n", "é"])),
    m.Burst(16, [1], [2]),
    m.AbortSamples([1, 2]),
    m.Rescore([1], [2]),
    m.ScoreTogether([1, 2]),
    m.Unwanted([3]),
    m.EndEpisodes(2),
    m.Forget([]),
    m.Peek([2**62]),
    m.PeekEnd([2**62]),
    m.HandOver(3, "fabric", [MOVE], ["token_ids"], {"rewards": b"\0" * 8, "scores": b"\xff" * 8}, True),
    m.LoadRows(1, [0, 1]),
    m.LoadRollouts(1, "runs/a", 3, [7 << 24]),
    m.SaveHeld("runs/a/checkpoints/step_000002", [7 << 24]),
    m.LoadHeld("runs/a/checkpoints/step_000002", ["held_rank0002.safetensors"], [7 << 24]),
    m.Logprobs(1, "reference", "ref_logprobs", [[0], [1, 2]]),
    m.SendTokens(1, "fabric", "ref_logprobs", [MOVE]),
    m.SendTokens(1, "fabric", "returns", [MOVE], "critic"),
    m.Values(1, [[0], [1, 2]]),
    m.Weigh(1, [(7 << 24, 0.5)]),
    m.Advantages(1),
    m.TrainStep(1, [[0], []], 12.5, 2.0),
    m.TrainCritic(1, [[0], []], 12.5, 2.0),
    m.DropBatch(1),
    m.Ask("witness", "likelihood", {"batch": 1}),
    m.PassOn(1, "trainer", "ref_logprobs"),
    m.WriteRollouts(1, "rollouts/step_000001", {"step": 1, "lr": 0.5, "name": "x"}),
    m.Pull(4, [0, 2]),
    m.SaveState("checkpoints/x"),
    m.FinishSave(10.0),
    m.CheckFiles("checkpoints/x", [("a", 3, "abc")]),
    m.FinishCheck(10.0),
    m.LoadState("checkpoints/x"),
    m.Export("hf"),
    m.ExportCritic("hf_critic"),
]
EVENTS: list[Any] = [
    m.Joined("node1", 77),
    m.Done(4, {"loss": (1.0, 2.0, 0.0, 1.0)}, [("a", 3, "00")], ["text"]),
    m.Failed(4, "Burst", "ValueError: no"),
    m.BurstDone(4, [m.Ended(5, 9, 4, "stop")], [], 16, 0.1),
    m.Scored([SCORED]),
    m.AwaitSiblings([5, 6]),
    m.Observed(5, True, SCORED),
    m.Lost(2, "was killed"),
]
POSTS: list[Any] = [
    m.Post([m.Response(5, "maths", "4", b"{}", "stop"), m.TurnDelta(5, b"\0\0\0\0", b"[]")]),
    m.Post([m.Turn(5, "maths", "", b"{}", "stop", 2, 3, 4, begins=True)]),
]


@pytest.fixture(scope="module")
def server() -> TCPStore:
    return queues.serve("127.0.0.1", 30)


@pytest.fixture
def store(server: TCPStore) -> TCPStore:
    """A client of a store whose queue is empty."""
    client = queues.connect("127.0.0.1", server.port, 30)
    while client.queue_len(QUEUE):
        client.queue_pop(QUEUE)
    return client


@pytest.fixture
def inbox(server: TCPStore) -> Inbox:
    return Inbox(queues.connect("127.0.0.1", server.port, 30), QUEUE, KEY, m.Command)


def raw_of(
    store: TCPStore, message: Any, *, key: bytes = KEY, sender: Sender | None = None, queue: str = QUEUE
) -> bytes:
    """The bytes that a sender pushes."""
    (sender or Sender(store, key, 0)).send(queue, message)
    return store.queue_pop(queue)


def sign(frame: bytes) -> bytes:
    return queues._mac(KEY, QUEUE, frame) + frame


def test_samples_cover_every_message() -> None:
    assert {type(c) for c in COMMANDS} == set(get_args(m.Command))
    assert {type(e) for e in EVENTS} == set(get_args(m.Event))


@pytest.mark.parametrize(
    ("samples", "types"),
    [(COMMANDS, m.Command), (EVENTS, m.Event), (POSTS, m.Post)],
    ids=["commands", "events", "posts"],
)
def test_every_message_arrives_as_it_was_sent(
    server: TCPStore, store: TCPStore, samples: list[Any], types: Any
) -> None:
    sender, inbox = Sender(store, KEY, 3), Inbox(queues.connect("127.0.0.1", server.port, 30), QUEUE, KEY, types)
    assert [sender.send(QUEUE, message) for message in samples] == list(range(1, len(samples) + 1))
    for number, message in enumerate(samples, 1):
        assert inbox.get(5) == (3, number, message)
    assert inbox.get() is None
    assert inbox.refused == []


def test_senders_are_numbered_apart(store: TCPStore, inbox: Inbox) -> None:
    first, second = Sender(store, KEY, 1), Sender(store, KEY, -2)
    for sender in (first, second, second, first):
        sender.send(QUEUE, m.Leave())
        store_elsewhere = sender.send("rank/2", m.Leave())  # another queue has its own numbers
        assert store_elsewhere > 0
    assert [inbox.get(5)[:2] for _ in range(4)] == [(1, 1), (-2, 1), (-2, 2), (1, 2)]


def test_threads_share_a_sender(store: TCPStore, inbox: Inbox) -> None:
    sender = Sender(store, KEY, 1)
    threads = [threading.Thread(target=lambda: [sender.send(QUEUE, m.Leave()) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert [inbox.get(5)[1] for _ in range(200)] == list(range(1, 201))


# -- refused -----------------------------------------------------------------------------------------------------


def refuse(store: TCPStore, inbox: Inbox, raw: bytes, why: str, capfd: pytest.CaptureFixture[str]) -> None:
    """`raw` is refused and named, and the good message behind it arrives."""
    store.queue_push(QUEUE, raw)
    Sender(store, KEY, 99).send(QUEUE, m.Leave())
    assert inbox.get(5) == (99, 1, m.Leave())
    assert len(inbox.refused) == 1
    assert why in inbox.refused[0]
    assert f"refused on queue {QUEUE}: {inbox.refused[0]}" in capfd.readouterr().err


def test_forged(store: TCPStore, inbox: Inbox, capfd: pytest.CaptureFixture[str]) -> None:
    refuse(store, inbox, raw_of(store, m.Export("hf"), key=b"j" * 32), "wrong signature", capfd)


@pytest.mark.parametrize("raw", [b"", b"x", b"\0" * 32, os.urandom(500)], ids=["empty", "short", "zeros", "noise"])
def test_noise(store: TCPStore, inbox: Inbox, raw: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    refuse(store, inbox, raw, f"a message of {len(raw)} bytes with a wrong signature", capfd)


def test_replayed(store: TCPStore, inbox: Inbox, capfd: pytest.CaptureFixture[str]) -> None:
    raw = raw_of(store, m.Export("hf"))
    store.queue_push(QUEUE, raw)
    assert inbox.get(5) == (0, 1, m.Export("hf"))
    refuse(store, inbox, raw, "message 1 of sender 0, replayed (expected 2)", capfd)


def test_replayed_from_another_queue(store: TCPStore, inbox: Inbox, capfd: pytest.CaptureFixture[str]) -> None:
    refuse(store, inbox, raw_of(store, m.Leave(), queue="rank/2"), "wrong signature", capfd)


def test_out_of_order(store: TCPStore, inbox: Inbox) -> None:
    sender = Sender(store, KEY, 4)
    first, second = raw_of(store, m.Advantages(1), sender=sender), raw_of(store, m.Advantages(2), sender=sender)
    store.queue_push(QUEUE, second)
    store.queue_push(QUEUE, first)
    with pytest.raises(ControlError, match=r"queue rank/1: message 2 of sender 4 came where 1 was due"):
        inbox.get(5)


def test_stolen(store: TCPStore, inbox: Inbox) -> None:
    sender = Sender(store, KEY, 4)
    sender.send(QUEUE, m.Advantages(1))
    assert inbox.get(5) is not None
    raw_of(store, m.Advantages(2), sender=sender)  # somebody takes it out
    sender.send(QUEUE, m.Advantages(3))
    with pytest.raises(ControlError, match=r"message 3 of sender 4 came where 2 was due; messages were lost or taken"):
        inbox.get(5)


def test_signed_but_no_frame(store: TCPStore, inbox: Inbox, capfd: pytest.CaptureFixture[str]) -> None:
    refuse(store, inbox, sign(b"\x93\x01\x02"), "a signed message that is not a frame", capfd)


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
def test_wrong_schema(store: TCPStore, inbox: Inbox, body: Any, capfd: pytest.CaptureFixture[str]) -> None:
    refuse(store, inbox, raw_of(store, body), "message 1 of sender 0 does not fit the schema", capfd)


def test_the_sender_refuses_what_is_too_large(store: TCPStore, inbox: Inbox) -> None:
    sender = Sender(store, KEY, 0)
    with pytest.raises(ValueError, match=r"Done to rank/1 has 671088\d\d bytes, over the limit of 67108864: store "):
        sender.send(QUEUE, m.Done(1, texts=["x" * (64 << 20)]))
    assert inbox.get() is None
    assert sender.send(QUEUE, m.Leave()) == 1  # the refused one used no number
    assert inbox.get(5) == (0, 1, m.Leave())


@pytest.mark.parametrize("num_bytes", [PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES, 5 * PART_BYTES + 7])
def test_a_large_message_goes_in_parts(store: TCPStore, inbox: Inbox, num_bytes: int) -> None:
    message = m.Export("x" * (num_bytes - 13))  # 13: the list, the tag and the string's head
    num_parts = -(-num_bytes // PART_BYTES)
    sender = Sender(store, KEY, 0)
    assert sender.send(QUEUE, message) == num_parts == store.queue_len(QUEUE)
    sender.send(QUEUE, m.Leave())
    assert inbox.get(5) == (0, num_parts, message)
    assert inbox.get(5) == (0, num_parts + 1, m.Leave())
    assert inbox.refused == []


def test_parts_of_several_senders_may_alternate_and_come_late(store: TCPStore, inbox: Inbox) -> None:
    large = {number: m.Export(str(number) * 2 * PART_BYTES) for number in (1, 2)}
    parts: dict[int, list[bytes]] = {}
    for number, message in large.items():
        Sender(store, KEY, number).send(QUEUE, message)
        parts[number] = [store.queue_pop(QUEUE) for _ in range(3)]
    for first, second in zip(parts[1][:2], parts[2][:2], strict=True):
        store.queue_push(QUEUE, first)
        store.queue_push(QUEUE, second)
    assert inbox.get(0.01) is None
    store.queue_push(QUEUE, parts[2][2])
    assert inbox.get(5) == (2, 3, large[2])
    store.queue_push(QUEUE, parts[1][2])
    assert inbox.get(5) == (1, 3, large[1])


def test_a_stolen_part_is_a_gap(store: TCPStore, inbox: Inbox) -> None:
    Sender(store, KEY, 0).send(QUEUE, m.Export("x" * 2 * PART_BYTES))
    parts = [store.queue_pop(QUEUE) for _ in range(3)]
    for part in (parts[0], parts[2]):
        store.queue_push(QUEUE, part)
    with pytest.raises(ControlError, match="message 3 of sender 0 came where 2 was due"):
        inbox.get(5)


def test_the_inbox_refuses_what_is_too_large(store: TCPStore, inbox: Inbox, capfd: pytest.CaptureFixture[str]) -> None:
    refuse(store, inbox, sign(b"x" * (2 << 20)), "a message of 2097184 bytes, over the limit", capfd)


def test_a_flood_is_counted_and_holds_nobody_up(store: TCPStore, inbox: Inbox) -> None:
    for _ in range(queues.NAMED_REFUSALS + 50):
        store.queue_push(QUEUE, b"flood")
    Sender(store, KEY, 0).send(QUEUE, m.Leave())
    assert inbox.get(0.0) is None  # its time was over with the first of them
    assert inbox.get(10) == (0, 1, m.Leave())
    assert inbox.num_refused == queues.NAMED_REFUSALS + 50
    assert len(inbox.refused) == queues.NAMED_REFUSALS


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
    """What is pushed in place of genuine[number], each with the number it really has, None where it has none."""
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


@settings(max_examples=100, deadline=None)
@given(tampering=st.lists(TAMPERING, min_size=1, max_size=8))
def test_tampering_never_yields_what_was_not_sent_next(server: TCPStore, tampering: list[tuple[Any, ...]]) -> None:
    while server.queue_len(QUEUE):
        server.queue_pop(QUEUE)
    sender, inbox = Sender(server, KEY, 0), Inbox(server, QUEUE, KEY, m.Command)
    genuine = [raw_of(server, m.Advantages(n), sender=sender) for n in range(len(tampering))]
    pushed = [push for number, how in enumerate(tampering) for push in tamper(genuine, number, *how)]
    accepted, refused, gap = 0, 0, False
    for raw, number in pushed:
        server.queue_push(QUEUE, raw)
        if gap or (number is not None and number > accepted):
            gap = True
        elif number == accepted:
            accepted += 1
        else:
            refused += 1
    got = []
    with pytest.raises(ControlError) if gap else contextlib.nullcontext():
        while (message := inbox.get()) is not None or server.queue_len(QUEUE):
            got += [message[2]] if message is not None else []
    assert got == [m.Advantages(number) for number in range(accepted)]
    assert inbox.num_refused == refused


# -- waiting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [0.0, 0.3, 1.0009, 1.3])
def test_an_empty_queue_costs_the_time_asked_for(inbox: Inbox, store: TCPStore, timeout_s: float) -> None:
    start = time.monotonic()
    assert inbox.get(timeout_s) is None
    assert timeout_s <= time.monotonic() - start < timeout_s + 2


def test_a_blocked_get_wakes_up(inbox: Inbox, store: TCPStore) -> None:
    threading.Timer(0.3, lambda: Sender(store, KEY, 0).send(QUEUE, m.Leave())).start()
    start = time.monotonic()
    assert inbox.get(60) == (0, 1, m.Leave())
    assert time.monotonic() - start < 5


def start_host() -> tuple[subprocess.Popen[str], int]:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    return host, int(host.stdout.readline())


@pytest.fixture(scope="module")
def host() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that hosts a store, and the port."""
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
def test_a_lost_store_is_noticed_by_everyone_who_waits(host: tuple[subprocess.Popen[str], int]) -> None:
    process, port = host
    left, stayed, stopped = watched(port, "go"), watched(port, "stay"), watched(port, "stop")
    inbox = Inbox(queues.connect("127.0.0.1", port, 30), QUEUE, KEY, m.Command)
    quick = Inbox(queues.connect("127.0.0.1", port, 30), "rank/2", KEY, m.Command)
    sender = Sender(queues.connect("127.0.0.1", port, 30), KEY, 0)
    sender.send("rank/3", m.Leave())  # it works
    for child in (left, stayed, stopped):
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
    process.send_signal(signal.SIGSTOP)  # silent, but its connections stand
    assert left.wait(20) == ExitCode.STORE_LOST
    assert left.stderr is not None
    assert "hpcrl rank 7 on here: the control store has not answered for 1 s (while in Burst #3)" in left.stderr.read()
    process.send_signal(signal.SIGCONT)
    threading.Timer(0.3, process.kill).start()
    start = time.monotonic()
    with pytest.raises(StoreLost, match=r"control store is gone \(queue rank/1\)"):
        inbox.get(60)
    with pytest.raises(StoreLost, match="queue rank/2"):
        quick.get()
    with pytest.raises(StoreLost, match="Leave to rank/3 not sent"):
        for _ in range(10):  # the first one may still go into the socket
            sender.send("rank/3", m.Leave())
    with pytest.raises(StoreLost, match=f"no control store at 127.0.0.1:{port} within 0.5 s"):
        queues.connect("127.0.0.1", port, 0.5)
    assert time.monotonic() - start < 10
    assert stopped.poll() is None  # it was told that the store may end
    stopped.kill()
    for child in (left, stayed, stopped):
        child.communicate()


# -- what protects a queue and what does not, as docs/control_plane.md says --------------------------------------


def test_anybody_at_the_port_can_read_and_delete(server: TCPStore, store: TCPStore, inbox: Inbox) -> None:
    Sender(store, KEY, 0).send(QUEUE, m.Export("somewhere"))
    stranger = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    assert b"somewhere" in stranger.queue_pop(QUEUE)
    with pytest.raises(QueueEmptyError):
        stranger.queue_pop(QUEUE, block=False)
    assert inbox.get() is None


def test_noise_on_the_port_does_not_end_the_store(server: TCPStore, store: TCPStore, inbox: Inbox) -> None:
    for noise in (os.urandom(1000), b"\xff" * 100, bytes(100)):
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(noise)
    with pytest.raises(RuntimeError):
        queues.connect("127.0.0.1", server.port, 5).queue_push(QUEUE, bytes(9 << 20))
    Sender(store, KEY, 0).send(QUEUE, m.Leave())
    assert inbox.get(5) == (0, 1, m.Leave())
    assert inbox.num_refused == 0


def test_the_key_is_in_no_message(store: TCPStore) -> None:
    assert KEY not in raw_of(store, m.Export("hf"))
    assert msgspec.msgpack.decode(raw_of(store, m.Export("hf"))[queues.MAC_BYTES :]) == [
        0,
        1,
        msgspec.msgpack.encode(["Export", "hf"]),
        False,
    ]
