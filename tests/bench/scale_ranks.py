"""Scripted generator ranks: what they answer to the controller's commands, in virtual time or over real connections."""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections import deque
from functools import partial
from queue import Empty
from typing import Any

import msgspec
from torch.distributed import TCPStore

from hpcrl.messaging import messages as m
from hpcrl.messaging import queues
from hpcrl.messaging.mailbox_server import Arrival, Dialer, MailboxServer, Push
from hpcrl.messaging.nonblocking_sender import Encode
from hpcrl.messaging.world import CONTROLLER_QUEUE, rank_queue
from hpcrl.rollout.types import split_sample_id

KEY = bytes(32)
PROMPT_TOKENS = 200
JITTER = 0.05
SCORING_S = 0.1


class Script:
    """A replica's responses. Each burst ends a response with the same chance: any moment is like any other."""

    def __init__(self, rank: int, mean_bursts: int):
        self._draw = random.Random(rank)
        self._rate = 1.0 / mean_bursts
        self._ends: list[tuple[int, int, int]] = []  # heap of (burst, sample, burst it began at)
        self._begun: dict[int, int] = {}
        self._decode_chunk = 0

    def admit(self, command: m.Admit) -> None:
        for sample, _ in command.samples:
            bursts = 1 + int(self._draw.expovariate(self._rate))
            self._begun[sample] = self._decode_chunk
            heapq.heappush(self._ends, (self._decode_chunk + bursts, sample, self._decode_chunk))

    def burst(self, seq: int, num_tokens: int, seconds: float) -> m.DecodeChunkDone:
        self._decode_chunk += 1
        tokens, ended = num_tokens * len(self._begun), []
        while self._ends and self._ends[0][0] <= self._decode_chunk:
            _, sample, begun = heapq.heappop(self._ends)
            if self._begun.get(sample) == begun:
                ended.append(self._end(sample, num_tokens, "stop"))
        return m.DecodeChunkDone(seq, ended, [], tokens, seconds)

    def abort(self, seq: int, samples: list[int]) -> m.DecodeChunkDone:
        return m.DecodeChunkDone(seq, [self._end(i, 1, "abort") for i in samples if i in self._begun], [], 0, 0.0)

    def _end(self, sample: int, num_tokens: int, reason: str) -> m.Ended:
        tokens = num_tokens * (self._decode_chunk - self._begun.pop(sample))
        return m.Ended(sample, PROMPT_TOKENS + tokens, tokens, reason)

    def jitter(self) -> float:
        """A factor of a burst's time."""
        return self._draw.uniform(1 - JITTER, 1 + JITTER)


def scores(ended: list[m.Ended]) -> list[m.ScoredSample]:
    """Of responses that were not aborted."""
    return [m.ScoredSample(end.sample, float(end.sample % 2), float(end.sample % 2), "") for end in ended]


class Flow:
    """Messages of one direction."""

    def __init__(self) -> None:
        self.count = self.bytes = 0

    def add(self, raw: bytes) -> None:
        self.count += 1
        self.bytes += len(raw)


class Cluster:
    """Ranks in virtual time, behind the faces of a dialer and of the controller's queue. While rank 0 works, time
    passes as it does; when it waits, until the next message. What the ranks themselves take is not counted."""

    def __init__(self, num_replicas: int, burst_s: float, mean_bursts: int):
        self.now, self.bursts = 0.0, 0
        self.events, self.commands = Flow(), Flow()
        self._burst_s = burst_s
        self._replicas = {rank: Script(rank, mean_bursts) for rank in range(1, num_replicas + 1)}
        self._inboxes: dict[int, deque[tuple[int, Any]]] = {rank: deque() for rank in self._replicas}
        self._decoding: dict[int, tuple[int, m.DecodeChunk, float]] = {}
        self._queue: deque[Arrival] = deque()
        self._agenda: list[tuple[float, int, int, Any]] = []  # (time, tie, rank, event; None: a burst ends)
        self._ties = 0
        self._senders: dict[int, queues.Sender] = {}
        self._frames = msgspec.msgpack.Decoder(queues.Frame)
        self._commands = msgspec.msgpack.Decoder(m.Command)
        self._busy_s = self._since = 0.0

    def begin(self) -> None:
        """From now on rank 0 works."""
        self._since = time.perf_counter()  # the process's CPU time would cost more than what it is to measure

    def busy_s(self) -> float:
        """Seconds that rank 0 has worked."""
        self._pause()
        self.begin()
        return self._busy_s

    def dial(self, name: str) -> Push:
        """For rank 0."""
        return partial(self._command, name)

    def _event(self, rank: int, raw: bytes, encode: Encode | None = None) -> None:
        self.events.add(raw)
        self._queue.append(Arrival(rank, raw))

    def _command(self, name: str, raw: bytes, encode: Encode | None = None) -> None:
        self._pause()
        self.commands.add(raw)
        frame = self._frames.decode(raw[queues.MAC_BYTES :])
        rank = int(name.removeprefix(rank_queue(0)[:-1]))
        self._inboxes[rank].append((frame.seq, self._commands.decode(frame.body)))
        self._go_on(rank)
        self.begin()

    def qsize(self) -> int:
        return len(self._queue)

    def get(self, block: bool = True, timeout: float | None = None) -> Arrival:
        """The next event; with `block`, time passes until there is one."""
        self._pause()
        try:
            self._advance()
            while block and not self._queue:
                self.now = max(self.now, self._agenda[0][0])
                self._advance()
            if not self._queue:
                raise Empty
            return self._queue.popleft()
        finally:
            self.begin()

    def _pause(self) -> None:
        spent = time.perf_counter() - self._since
        self._busy_s += spent
        self.now += spent

    def _advance(self) -> None:
        """All that happens until now."""
        while self._agenda and self._agenda[0][0] <= self.now:
            at, _, rank, event = heapq.heappop(self._agenda)
            if event is None:
                self._end_burst(at, rank)
            else:
                self._say(rank, event)

    def _say(self, rank: int, event: Any) -> None:
        if rank not in self._senders:
            self._senders[rank] = queues.Sender(lambda _: partial(self._event, rank), KEY, rank)
        self._senders[rank].send(CONTROLLER_QUEUE, event)

    def _later(self, at: float, rank: int, event: Any) -> None:
        self._ties += 1
        heapq.heappush(self._agenda, (at, self._ties, rank, event))

    def _end_burst(self, at: float, rank: int) -> None:
        seq, command, seconds = self._decoding.pop(rank)
        done = self._replicas[rank].burst(seq, command.num_tokens, seconds)
        self.bursts += 1
        self._say(rank, done)
        by_scorer: dict[int, list[m.Ended]] = {}
        for end in done.finished:
            scorer = command.receivers[split_sample_id(end.sample)[0] % len(command.receivers)]
            by_scorer.setdefault(scorer, []).append(end)
        for scorer, ended in by_scorer.items():
            self._later(at + SCORING_S, scorer, m.Scored(scores(ended)))
        self._go_on(rank, at)

    def _go_on(self, rank: int, at: float | None = None) -> None:
        inbox, script = self._inboxes[rank], self._replicas[rank]
        while inbox and rank not in self._decoding:
            seq, command = inbox.popleft()
            match command:
                case m.Admit():
                    script.admit(command)
                case m.AbortSamples():
                    self._say(rank, script.abort(seq, command.samples))
                case m.DecodeChunk():
                    seconds = self._burst_s * script.jitter()
                    self._decoding[rank] = seq, command, seconds
                    self._later((self.now if at is None else at) + seconds, rank, None)


def serve_ranks(port: int, ranks: list[int], mean_bursts: int) -> None:
    """Play these ranks until they are told to leave: a thread each. They share a mailbox server, and have
    connections of their own to the controller."""
    threading.stack_size(1 << 18)
    store, mailbox_server = queues.connect("127.0.0.1", port, 60.0), MailboxServer("127.0.0.1", KEY)
    threads = [threading.Thread(target=_serve, args=(store, mailbox_server, rank, mean_bursts)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _serve(store: TCPStore, mailbox_server: MailboxServer, rank: int, mean_bursts: int) -> None:
    queue = rank_queue(rank)
    inbox = queues.Inbox(mailbox_server.queue(queue), queue, KEY, m.Command)
    mailbox_server.publish(store, rank)
    sender, script = queues.Sender(Dialer(store, KEY, rank, 60.0, 60.0), KEY, rank), Script(rank, mean_bursts)
    sender.send(CONTROLLER_QUEUE, m.Joined("here", rank))
    while (message := inbox.get(60.0)) is not None:
        _, seq, command = message
        match command:
            case m.Admit():
                script.admit(command)
            case m.AbortSamples():
                sender.send(CONTROLLER_QUEUE, script.abort(seq, command.samples))
            case m.DecodeChunk():
                done = script.burst(seq, command.num_tokens, 1e-3)
                sender.send(CONTROLLER_QUEUE, done)
                if done.finished:
                    sender.send(CONTROLLER_QUEUE, m.Scored(scores(done.finished)))
            case m.ReadTexts():
                sender.send(CONTROLLER_QUEUE, m.Done(seq))
            case m.Shutdown():
                sender.send(CONTROLLER_QUEUE, m.Done(seq))
                return
