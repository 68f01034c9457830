"""Samples that have left their replica for a score or an observation, and the ranks that owe it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from hpcrl.control.clock import AwakeClock
from hpcrl.control.controller import Controller
from hpcrl.rollout.types import split_sample_id


@dataclass(slots=True)
class Away:
    """A sample at its scorer or environment.

    receiver: that rank; None where it spoke of the sample before the replica said that the sample ended. replica: the
    first rank of the sample's replica. acting: an environment has the sample, else a scorer. awaits_siblings: no answer
    is asked for yet. answered: by a receiver that is None.
    """

    receiver: int | None = None
    replica: int = -1
    acting: bool = False
    awaits_siblings: bool = False
    answered: bool = False


@dataclass(slots=True)
class Receiver:
    """A scorer or env rank: the number of answers it owes, the samples that await their siblings there, and when it
    last showed that it works."""

    waiting: int = 0
    holding: set[int] = field(default_factory=set)
    heard: float = 0.0


class Awaited:
    """The answers that scorers and environments owe."""

    def __init__(self, controller: Controller, receivers: Iterable[int]):
        self._controller, self._clock = controller, AwakeClock(controller.command_s)
        self._away: dict[int, Away] = {}
        self._receivers = {rank: Receiver() for rank in receivers}
        self.siblings_meet = False
        """Some reward scores groups."""

    def __getitem__(self, sample: int) -> Away:
        """KeyError for a sample of which nothing is known."""
        return self._away[sample]

    @property
    def pending(self) -> bool:
        """Whether a scorer or environment is at work."""
        return any(receiver.waiting for receiver in self._receivers.values())

    def where(self, at: Callable[[Away], bool]) -> list[int]:
        """Those of the samples with a receiver of which this is true."""
        return [sample for sample, away in self._away.items() if away.receiver is not None and at(away)]

    def awaiting_siblings(self) -> list[int]:
        """Samples with a receiver that wait there for their siblings, ascending."""
        return sorted(sample for receiver in self._receivers.values() for sample in receiver.holding)

    def reach(self, sample: int, receiver: int, replica: int, acting: bool) -> None:
        """The sample has been sent to this rank."""
        before = self._away.pop(sample, None)
        held = before is not None and before.awaits_siblings
        self._away[sample] = Away(receiver, replica, acting, awaits_siblings=held)
        if held:
            self._receivers[receiver].holding.add(sample)
        else:
            self._expect(receiver)

    def hold(self, samples: Iterable[int]) -> None:
        """These await their siblings: their scorer is not asked for an answer. It may say so before the BurstDone."""
        self.siblings_meet = True
        for sample in samples:
            away = self._away.setdefault(sample, Away())
            if away.receiver is not None and not away.awaits_siblings:
                self._receivers[away.receiver].waiting -= 1
                self._receivers[away.receiver].holding.add(sample)
            away.awaits_siblings = True

    def ask(self, samples: Iterable[int]) -> None:
        """The siblings of these are there, so that an answer is awaited."""
        for sample in samples:
            away = self._away[sample]
            assert away.receiver is not None and away.awaits_siblings
            away.awaits_siblings = False
            self._receivers[away.receiver].holding.remove(sample)
            self._expect(away.receiver)

    def leave(self, sample: int) -> bool:
        """The sample is with its scorer or environment no more; whether it was."""
        away = self._away.get(sample)
        if away is None or away.receiver is None:
            return False
        del self._away[sample]
        receiver = self._receivers[away.receiver]
        if away.awaits_siblings:
            receiver.holding.remove(sample)
        else:
            receiver.waiting -= 1
        return True

    def answered(self, sample: int, wanted: bool) -> None:
        """An answer has come, maybe before the replica's BurstDone, which is then remembered for a sample that is
        wanted."""
        if not self.leave(sample) and wanted:
            self._away[sample] = Away(answered=True)

    def overtook(self, sample: int) -> bool:
        """Whether the answer was there before the replica said that the sample ended; that is forgotten now."""
        away = self._away.get(sample)
        if away is None or not away.answered:
            return False
        del self._away[sample]
        return True

    def forget_early(self, uids: Collection[int]) -> None:
        """No replica will tell any more of samples of these prompts."""
        early = [sample for sample, away in self._away.items() if away.receiver is None]
        for sample in early:
            if split_sample_id(sample)[0] in uids:
                del self._away[sample]

    def heard(self, rank: int) -> None:
        """The rank has said something."""
        if rank in self._receivers:
            self._receivers[rank].heard = self._clock.now()

    def check(self) -> None:
        """Give up a scorer or env rank that has work and has not answered anything for the deadline."""
        now = self._clock.now()
        for rank, receiver in sorted(self._receivers.items()):
            silent_s = now - receiver.heard
            if receiver.waiting > 0 and silent_s > self._controller.command_s:
                cause = f"{receiver.waiting} responses wait there without an answer"
                self._controller.give_up(rank, cause, silent_s)

    def _expect(self, rank: int) -> None:
        receiver = self._receivers[rank]
        if not receiver.waiting:
            receiver.heard = self._clock.now()
        receiver.waiting += 1
