"""A generator replica as rank 0 sees it: what its ranks are told, in one order, and what the first has to answer."""

from __future__ import annotations

from collections.abc import Sequence

from hpcrl.control import messages
from hpcrl.control.controller import Controller
from hpcrl.rollout.types import Sizes


class ReplicaLink:
    """Every rank of a replica hears the same commands in the same order. The first one answers, holds what is handed
    over, and stands for the replica in events and samples.

    live: samples that the replica decodes or queues. num_bursts: bursts, and orders to drop samples, that it has not
    answered. sizes: of ended samples that were neither taken nor dropped.
    """

    def __init__(self, controller: Controller, ranks: Sequence[int]):
        self._controller = controller
        self.ranks, self.first = tuple(ranks), ranks[0]
        self.live = self.num_bursts = 0
        self.sizes: dict[int, Sizes] = {}
        self._told: dict[int, messages.Burst] = {}  # by number, whom a burst was told to send to
        self._dropped: dict[int, Sequence[int]] = {}  # by number, samples that were to be dropped

    @property
    def lost(self) -> bool:
        """Whether one of its ranks is."""
        return not self._controller.lost.isdisjoint(self.ranks)

    def send(self, command: messages.Command) -> int:
        """Push a command to all ranks before anything else is pushed; returns its number at the first."""
        numbers = [self._controller.send(rank, command) for rank in self.ranks]
        return numbers[0]

    def burst(self, command: messages.Burst) -> None:
        """Have a burst decoded."""
        self._told[self.send(command)] = command
        self.num_bursts += 1

    def drop(self, samples: Sequence[int]) -> None:
        """Have samples stopped and dropped; answered like a burst."""
        self._dropped[self.send(messages.AbortSamples(list(samples)))] = samples
        self.num_bursts += 1

    def burst_done(self, event: messages.BurstDone) -> messages.Burst | None:
        """Take in an answer of the first rank; returns the burst it is about, None for samples that were dropped."""
        self.num_bursts -= 1
        self.live -= len(event.finished) + len(event.turns)
        for sample in self._dropped.pop(event.seq, ()):
            self.sizes.pop(sample, None)
        return self._told.pop(event.seq, None)

    def lose(self) -> None:
        """Expect nothing of it any more."""
        self.live = self.num_bursts = 0
        self.sizes = {}
