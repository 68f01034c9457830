"""Samples that replicas have sent to scorers and environments, and the ranks whose answers are outstanding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from hpcrl.messaging.dispatcher import Controller
from hpcrl.rollout.types import split_sample_id
from hpcrl.system.clock import AwakeClock


@dataclass(slots=True)
class PendingSample:
    """A sample at its scorer or environment.

    Args:
        receiver: Rank of the scorer or environment; None if it answered before the replica reported the sample.
        replica: First rank of the sample's replica; -1 until the replica has reported the sample.
        acting: Whether it is with an environment; otherwise it is with a scorer.
        awaits_group: Whether it waits for its group, so no answer is expected yet.
        answered: Whether the answer arrived while receiver is None.
    """

    receiver: int | None = None
    replica: int = -1
    acting: bool = False
    awaits_group: bool = False
    answered: bool = False


@dataclass(slots=True)
class Receiver:
    """A scorer or env rank: number of outstanding answers, samples that await their group, time of its last message."""

    waiting: int = 0
    holding: set[int] = field(default_factory=set)
    heard: float = 0.0


class PendingAnswers:
    """The outstanding answers of scorers and environments."""

    def __init__(self, controller: Controller, receivers: Iterable[int]):
        self._controller, self._clock = controller, AwakeClock(controller.command_s)
        self._samples: dict[int, PendingSample] = {}
        self._receivers = {rank: Receiver() for rank in receivers}
        self.scores_groups = False
        """Whether some reward scores groups."""

    def __getitem__(self, sample: int) -> PendingSample:
        """KeyError for an unknown sample."""
        return self._samples[sample]

    @property
    def pending(self) -> bool:
        """Whether an answer of a scorer or environment is outstanding."""
        return any(receiver.waiting for receiver in self._receivers.values())

    def where(self, at: Callable[[PendingSample], bool]) -> list[int]:
        """The samples reported by their replica for which `at` is true."""
        return [sample for sample, away in self._samples.items() if away.replica >= 0 and at(away)]

    def receivers_of(self, uid: int) -> list[int]:
        """Of each of a prompt's samples whose answer is outstanding, the rank that has it."""
        return [
            away.receiver
            for sample, away in self._samples.items()
            if split_sample_id(sample)[0] == uid and away.receiver is not None and not away.awaits_group
        ]

    def awaiting_group(self) -> list[int]:
        """Samples that wait at a scorer for their group, ascending, even if their replica has not reported them yet."""
        return sorted(sample for receiver in self._receivers.values() for sample in receiver.holding)

    def sent(self, sample: int, receiver: int, replica: int, acting: bool) -> None:
        """Record that the sample has been sent to this rank."""
        before = self._samples.pop(sample, None)
        held = before is not None and before.awaits_group
        self._samples[sample] = PendingSample(receiver, replica, acting, awaits_group=held)
        if held:
            self._receivers[receiver].holding.add(sample)
        else:
            self._expect(receiver)

    def hold_for_group(self, scorer: int, samples: Iterable[int]) -> None:
        """Record that these samples wait for their group at this scorer, so no answer is outstanding. The scorer's
        message may arrive before the DecodeChunkDone, and after the loss of the replica."""
        self.scores_groups = True
        for sample in samples:
            if (away := self._samples.get(sample)) is None:
                away = self._samples[sample] = PendingSample(scorer)
            elif not away.awaits_group:
                self._receivers[scorer].waiting -= 1
            away.awaits_group = True
            self._receivers[scorer].holding.add(sample)

    def score_group(self, samples: Iterable[int]) -> None:
        """Expect answers for these samples, whose groups are complete."""
        for sample in samples:
            away = self._samples[sample]
            assert away.receiver is not None and away.awaits_group
            away.awaits_group = False
            self._receivers[away.receiver].holding.remove(sample)
            self._expect(away.receiver)

    def remove(self, sample: int) -> bool:
        """Remove the sample from its scorer or environment; returns whether it was there."""
        away = self._samples.get(sample)
        if away is None or away.receiver is None:
            return False
        del self._samples[sample]
        receiver = self._receivers[away.receiver]
        if away.awaits_group:
            receiver.holding.remove(sample)
        else:
            receiver.waiting -= 1
        return True

    def answered(self, sample: int, wanted: bool) -> None:
        """Remove a sample that was answered, or record an early answer (before its DecodeChunkDone) if it is wanted."""
        if not self.remove(sample) and wanted:
            self._samples[sample] = PendingSample(answered=True)

    def answered_early(self, sample: int) -> bool:
        """Whether the answer arrived before the replica reported the end of the sample; clears the record."""
        away = self._samples.get(sample)
        if away is None or not away.answered:
            return False
        del self._samples[sample]
        return True

    def drop_early(self, uids: Collection[int]) -> None:
        """Forget early answers for these prompts, whose samples no replica will report any more."""
        early = [sample for sample, away in self._samples.items() if away.answered]
        for sample in early:
            if split_sample_id(sample)[0] in uids:
                del self._samples[sample]

    def touch(self, rank: int) -> None:
        """Record the arrival of a message from the rank."""
        if rank in self._receivers:
            self._receivers[rank].heard = self._clock.now()

    def check(self) -> None:
        """Treat a scorer or env rank as lost if it has work and has not answered within the deadline."""
        now = self._clock.now()
        for rank, receiver in sorted(self._receivers.items()):
            silent_s = now - receiver.heard
            if receiver.waiting > 0 and silent_s > self._controller.command_s:
                cause = f"{receiver.waiting} responses wait there without an answer"
                self._controller.declare_lost(rank, cause, silent_s)

    def _expect(self, rank: int) -> None:
        receiver = self._receivers[rank]
        if not receiver.waiting:
            receiver.heard = self._clock.now()
        receiver.waiting += 1
