"""Responses and observations from rank to rank."""

from __future__ import annotations

import time

import pytest

from hpcrl.control import queues
from hpcrl.control.mailbox import CHUNK_BYTES, Mailbox
from hpcrl.control.messages import Response, TurnDelta
from hpcrl.control.queues import StoreLost
from hpcrl.control.world import World
from tests.dist.conftest import Threads

KEY = b"k" * 32


def response(sample: int, text: str = "4", meta: bytes = b"{}") -> Response:
    return Response(sample, "maths", text, meta, "stop")


@pytest.fixture(scope="module")
def worlds(threads: Threads) -> list[World]:
    for world in threads.worlds[1:]:
        world.mailbox.open()
        world.mailbox.open()  # harmless
    return threads.worlds


def receive(world: World, kind: type, count: int) -> list:
    items = []
    deadline = time.monotonic() + 20
    while len(items) < count and time.monotonic() < deadline:
        items += world.mailbox.receive(kind, 1.0)
    return items


def test_items_arrive_in_order_and_by_kind(worlds: list[World]) -> None:
    texts = [
        "",
        "é\0\n",
        "x" * (CHUNK_BYTES // 2),
        "y" * CHUNK_BYTES,
        "w" * 4 * CHUNK_BYTES,
        "z",
    ]  # several messages, one in parts
    sent = [response(i, text) for i, text in enumerate(texts)]
    delta = TurnDelta(7, b"\1\0\0\0")
    worlds[1].mailbox.send(2, [*sent, delta])
    worlds[2].mailbox.send(2, [response(9)])  # to itself
    assert receive(worlds[2], TurnDelta, 1) == [delta]
    got = receive(worlds[2], Response, len(sent) + 1)
    assert [item for item in got if item.sample != 9] == sent
    assert response(9) in got
    assert worlds[2].mailbox.receive(Response) == []


def test_an_item_over_the_limit_is_refused_with_its_size_and_the_next_goes_through(worlds: list[World]) -> None:
    with pytest.raises(ValueError, match=r"Post to mail/2 has 67108\d\d\d bytes, over the limit of 67108864"):
        worlds[1].mailbox.send(2, [response(1, "x" * (64 << 20))])
    worlds[1].mailbox.send(2, [response(2)])
    assert receive(worlds[2], Response, 1) == [response(2)]


def test_a_lost_receiver_is_named_and_not_tried_again(worlds: list[World]) -> None:
    store = worlds[1].store
    sender, receiver = Mailbox(store, KEY, 11, "127.0.0.1", 30.0), Mailbox(store, KEY, 12, "127.0.0.1", 30.0)
    receiver.open()
    sender.send(12, [response(1)])
    assert receiver.receive(Response, 5.0) == [response(1)]
    del receiver  # its store goes with it
    with pytest.raises(StoreLost, match="the mailbox of rank 12 is gone"):
        for _ in range(20):  # the first ones may still go into the socket
            sender.send(12, [response(2)])
            time.sleep(0.05)
    start = time.monotonic()
    for late in (sender, Mailbox(store, KEY, 13, "127.0.0.1", 30.0)):  # one that never knew it
        for _ in range(3):
            with pytest.raises(StoreLost, match="the mailbox of rank 12 is gone"):
                late.send(12, [response(3)])
    assert time.monotonic() - start < 10, "a sender that waits for the timeout would seem lost itself"


def test_a_rank_without_a_mailbox_is_named(worlds: list[World]) -> None:
    store = queues.connect("127.0.0.1", worlds[0].store.port, 0.3)
    mailbox = Mailbox(store, KEY, 14, "127.0.0.1", 0.3)
    with pytest.raises(StoreLost, match="the mailbox of rank 99 is gone"):
        mailbox.send(99, [response(1)])
