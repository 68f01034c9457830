"""Send finished text, turns and observations directly from rank to rank, not through the controller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar, cast

from hpcrl.messaging.mailbox_server import SenderEnded
from hpcrl.messaging.messages import EnvObservation, Post, Response, Turn
from hpcrl.messaging.queues import Inbox, Sender

CHUNK_BYTES = 1 << 20
MailItem = Response | Turn | EnvObservation
Kind = TypeVar("Kind", Response, Turn, EnvObservation)


def mail_queue(rank: int) -> str:
    return f"mail/{rank}"


class Mailbox:
    """Sends to other ranks' mailboxes and reads its own. `broken` lists the senders of lost messages."""

    def __init__(self, rank: int, sender: Sender, inbox: Inbox):
        """`inbox` reads mail_queue(rank)."""
        self._rank, self._sender, self._inbox = rank, sender, inbox
        self._arrived: dict[type, list[MailItem]] = {Response: [], Turn: [], EnvObservation: []}
        self.broken: list[SenderEnded] = []

    def send(self, rank: int, items: Sequence[MailItem]) -> None:
        """Send items in chunks of about 1 MiB; items to this rank go directly.

        ReaderLost if the receiver is gone, and then immediately on every later call. ValueError with the size if an
        item exceeds the maximum message size.
        """
        if rank == self._rank:
            self._take_in(items)
            return
        for chunk in _chunks(items):
            self._sender.send(mail_queue(rank), Post(chunk))

    def receive(self, kind: type[Kind], timeout_s: float = 0.0) -> list[Kind]:
        """All items of a kind that have arrived, in order per sender; waits up to timeout_s for the first message.
        Items of other kinds stay in the mailbox, which all roles of the rank share."""
        while (post := self._inbox.get(0.0 if self._arrived[kind] else timeout_s)) is not None:
            self._take_in(post[2].items)
        self.broken += [ended for ended in self._inbox.take_ended() if ended.how == "gap"]
        chosen, self._arrived[kind] = self._arrived[kind], []
        return cast(list[Kind], chosen)

    def _take_in(self, items: Sequence[MailItem]) -> None:
        for item in items:
            self._arrived[type(item)].append(item)


def _chunks(items: Sequence[MailItem]) -> Iterator[list[MailItem]]:
    """Split the items into non-empty lists of about CHUNK_BYTES."""
    chunk: list[MailItem] = []
    size = 0
    for item in items:
        if isinstance(item, EnvObservation):
            weight = len(item.token_ids) + len(item.messages)
        else:
            weight = len(item.text) * 4 + len(item.meta)
        weight += sum(len(medium.content) for medium in item.media)
        if isinstance(item, Response):
            weight += len(item.token_ids) + sum(len(text) * 4 + len(ids) for text, ids in item.earlier)
        if chunk and size + weight > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += weight
    if chunk:
        yield chunk
