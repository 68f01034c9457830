"""Rank 0's view of a generator replica: its commands, in one order for all ranks, and its outstanding answers."""

from __future__ import annotations

from collections.abc import Sequence

from hpcrl.messaging import messages
from hpcrl.messaging.dispatcher import Controller
from hpcrl.rollout.types import Sizes


class ReplicaLink:
    """Every rank of a replica gets the same commands in the same order. The first rank answers, transfers samples, and
    identifies the replica in events and samples.

    Attributes:
        live: Number of samples that the replica decodes or queues.
        num_chunks: Number of unanswered decode chunks and aborts.
        sizes: Sizes of ended samples that were neither taken nor dropped.
    """

    def __init__(self, controller: Controller, ranks: Sequence[int]):
        self._controller = controller
        self.ranks, self.first = tuple(ranks), ranks[0]
        self.live = self.num_chunks = 0
        self._given_up = False
        self.sizes: dict[int, Sizes] = {}
        self._told: dict[int, messages.DecodeChunk] = {}  # unanswered decode chunks by command number
        self._dropped: dict[int, Sequence[int]] = {}  # samples of unanswered aborts by command number

    @property
    def lost(self) -> bool:
        return not self._controller.lost.isdisjoint(self.ranks)

    def send(self, command: messages.Command) -> int:
        """Send a command to all ranks; returns its number on the first rank."""
        numbers = [self._controller.send(rank, command) for rank in self.ranks]
        return numbers[0]

    def decode_chunk(self, command: messages.DecodeChunk) -> None:
        self._told[self.send(command)] = command
        self.num_chunks += 1

    def drop(self, samples: Sequence[int]) -> None:
        """Make the replica stop and drop samples; it answers as to a decode chunk."""
        self._dropped[self.send(messages.AbortSamples(list(samples)))] = samples
        self.num_chunks += 1

    def decode_chunk_done(self, event: messages.DecodeChunkDone) -> messages.DecodeChunk | None:
        """Handle an answer of the first rank; returns its decode chunk, None for an abort."""
        self.num_chunks -= 1
        self.live -= len(event.finished) + len(event.turns)
        for sample in self._dropped.pop(event.seq, ()):
            self.sizes.pop(sample, None)
        return self._told.pop(event.seq, None)

    def drops(self, sample: int) -> bool:
        """Whether the command to drop the sample is unanswered; until its answer the replica may still report that the
        sample ended."""
        return any(sample in samples for samples in self._dropped.values())

    def lose(self) -> bool:
        """Stop waiting for the replica; returns whether this is the first call."""
        self.live = self.num_chunks = 0
        self.sizes, self._dropped = {}, {}
        before, self._given_up = self._given_up, True
        return not before
