"""Responses and observations from rank to rank."""

from __future__ import annotations

import time

import pytest

from hpcrl.messaging.mailbox import CHUNK_BYTES, MailItem, _chunks
from hpcrl.messaging.messages import EnvObservation, Response, Turn
from hpcrl.messaging.world import World
from hpcrl.spec.media import IMAGE, Medium
from tests.dist.conftest import Threads


def response(sample: int, text: str = "4", meta: bytes = b"{}") -> Response:
    return Response(sample, "maths", text, meta, "stop")


@pytest.fixture(scope="module")
def worlds(threads: Threads) -> list[World]:
    return threads.worlds


def receive(world: World, kind: type, count: int) -> list:
    items = []
    deadline = time.monotonic() + 20
    while len(items) < count and time.monotonic() < deadline:
        items += world.mailbox.receive(kind, 1.0)
    return items


def test_items_arrive_in_order_by_kind(worlds: list[World]) -> None:
    texts = [
        "",
        "é\0\n",
        "x" * (CHUNK_BYTES // 2),
        "y" * CHUNK_BYTES,
        "w" * 4 * CHUNK_BYTES,
        "z",
    ]  # several messages
    sent = [response(i, text) for i, text in enumerate(texts)]
    delta = EnvObservation(7, b"\1\0\0\0")
    worlds[1].mailbox.send(2, [*sent, delta])
    worlds[2].mailbox.send(2, [response(9)])  # to itself
    assert receive(worlds[2], EnvObservation, 1) == [delta]
    got = receive(worlds[2], Response, len(sent) + 1)
    assert [item for item in got if item.sample != 9] == sent
    assert response(9) in got
    assert worlds[2].mailbox.receive(Response) == []


def test_pixels_count_in_the_size_of_a_message() -> None:
    """Three pictures of .4 MiB are more than a message of about 1 MiB, five tokens are not."""
    media = (Medium(IMAGE, bytes(2 * CHUNK_BYTES // 5), 1, 1),)
    items: dict[type, list[MailItem]] = {
        Response: [Response(n, "maths", "4", b"{}", "stop", media=media) for n in range(5)],
        Turn: [Turn(n, "maths", "", b"{}", "stop", 1, media=media) for n in range(5)],
        EnvObservation: [EnvObservation(n, bytes(4), b"[]", media) for n in range(5)],
    }
    for kind, sent in items.items():
        chunks = list(_chunks(sent))
        assert [len(chunk) for chunk in chunks] == [2, 2, 1], kind
        assert [item for chunk in chunks for item in chunk] == sent
    assert [len(chunk) for chunk in _chunks([EnvObservation(n, bytes(4), b"[]") for n in range(5)])] == [5]


def test_a_too_large_item_is_refused_with_its_size_and_the_next_arrives(worlds: list[World]) -> None:
    with pytest.raises(ValueError, match=r"Post to mail/2 has 67108\d\d\d bytes, over the limit of 67108864"):
        worlds[1].mailbox.send(2, [response(1, "x" * (64 << 20))])
    worlds[1].mailbox.send(2, [response(2)])
    assert receive(worlds[2], Response, 1) == [response(2)]
