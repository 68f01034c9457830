"""Finished text, turns and observations from rank to rank, not through the controller.

The receiving rank hosts the queue, so the load is spread over the ranks that do the work.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar, cast

from torch.distributed import DistStoreError, TCPStore

from hpcrl.control import queues
from hpcrl.control.listener import Listener
from hpcrl.control.messages import Post, Response, Turn, TurnDelta

CHUNK_BYTES = 1 << 20
MailItem = Response | Turn | TurnDelta
Kind = TypeVar("Kind", Response, Turn, TurnDelta)


def _mail_queue(rank: int) -> str:
    return f"mail/{rank}"


class Mailbox:
    """Sends to the mailboxes of other ranks; hosts its own after open()."""

    def __init__(self, store: TCPStore, key: bytes, rank: int, address: str, timeout_s: float):
        self._store, self._key, self._rank, self._address, self._timeout_s = store, key, rank, address, timeout_s
        self._server: TCPStore | None = None
        self._inbox: Listener | None = None
        self.news = threading.Event()  # set when a message arrives
        self._senders: dict[int, queues.Sender] = {}
        self._lost: set[int] = set()
        self._arrived: dict[type, list[MailItem]] = {Response: [], Turn: [], TurnDelta: []}

    def open(self) -> None:
        """Start to receive (idempotent); publishes the address in the control store."""
        if self._server is None:
            self._server = queues.serve(self._address, self._timeout_s)
            client = queues.connect(self._address, self._server.port, self._timeout_s)
            self._inbox = Listener(queues.Inbox(client, _mail_queue(self._rank), self._key, Post), self.news)
            self._store.set(f"mailbox/{self._rank}", f"{self._address}:{self._server.port}")

    def send(self, rank: int, items: Sequence[MailItem]) -> None:
        """Send items in chunks of about 1 MiB; items to this rank go directly.

        StoreLost if the receiver is gone, and then at once on every later call. ValueError with the size for an item
        above the maximum of a message.
        """
        if rank == self._rank:
            self._take_in(items)
            return
        if rank in self._lost:
            raise queues.StoreLost(f"the mailbox of rank {rank} is gone")
        try:
            if rank not in self._senders:
                self._senders[rank] = self._connect(rank)
            for chunk in _chunks(items):
                self._senders[rank].send(_mail_queue(rank), Post(chunk))
        except (queues.StoreLost, DistStoreError) as error:
            self._lost.add(rank)
            raise queues.StoreLost(f"the mailbox of rank {rank} is gone") from error

    def _connect(self, rank: int) -> queues.Sender:
        host, port = self._store.get(f"mailbox/{rank}").decode().rsplit(":", 1)
        # A receiver listens before its address is known. Where nothing listens any more, torch would try again for
        # twice the timeout, in which the sender itself would seem lost.
        try:
            socket.create_connection((host, int(port)), self._timeout_s).close()
        except OSError as error:
            raise queues.StoreLost(f"nothing listens at {host}:{port}") from error
        return queues.Sender(queues.connect(host, int(port), self._timeout_s), self._key, self._rank)

    def receive(self, kind: type[Kind], timeout_s: float = 0.0) -> list[Kind]:
        """All items of a kind that have arrived, in order per sender; waits up to timeout_s for the first message.
        Other kinds are kept: roles that share a rank share its mailbox."""
        while self._inbox is not None:
            post = self._inbox.get(0.0 if self._arrived[kind] else timeout_s)
            if post is None:
                break
            self._take_in(post[2].items)
        chosen, self._arrived[kind] = self._arrived[kind], []
        return cast(list[Kind], chosen)

    def _take_in(self, items: Sequence[MailItem]) -> None:
        for item in items:
            self._arrived[type(item)].append(item)


def _chunks(items: Sequence[MailItem]) -> Iterator[list[MailItem]]:
    """The items in lists of about CHUNK_BYTES, none empty."""
    chunk: list[MailItem] = []
    size = 0
    for item in items:
        if isinstance(item, TurnDelta):
            weight = len(item.token_ids) + len(item.messages)
        else:
            weight = len(item.text) * 4 + len(item.meta)
        if isinstance(item, Response):
            weight += len(item.token_ids) + sum(len(text) * 4 + len(ids) for text, ids in item.earlier)
        if chunk and size + weight > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += weight
    if chunk:
        yield chunk
