"""Work that takes longer than a command's deadline: ranks are polled, and must make progress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpcrl.messaging.dispatcher import Controller, RankSilent, Started
from hpcrl.messaging.messages import Command, Done
from hpcrl.system.clock import AwakeClock


class Stalled(RankSilent):
    """A rank made no progress with its files within a command's deadline."""


def raise_if_unwritten(controller: Controller, answers: Mapping[int, Done]) -> None:
    """OSError, with its number, if a full or failing file system did not take a rank's files of a checkpoint."""
    for rank, answer in answers.items():
        if answer.unwritten is not None:
            number, text = answer.unwritten
            error = OSError(f"{controller.describe(rank)}: {text}")
            error.errno = number
            raise error


class PolledOperation:
    """Work that ranks do in parallel to their commands. `answers` has the answer of every finished rank."""

    def __init__(self, controller: Controller, ranks: Iterable[int], doing: str):
        """`doing` names the action on a file in error messages, such as "reading"."""
        self._controller, self._doing = controller, doing
        self._clock = AwakeClock(controller.command_s)
        self._reached: dict[int, tuple[int, float]] = dict.fromkeys(ranks, (0, self._clock.now()))
        self._asked: Started = []
        self.answers: dict[int, Done] = {}

    def ask(self, command: Command) -> bool:
        """Send the command, which asks for progress, to all unfinished ranks; return whether all are finished.

        Stalled names a rank without progress for command_s, OSError one whose file system is full or fails; other
        errors as in Controller.call().
        """
        self._send(command)
        return self._hear()

    def poll(self, command: Command) -> bool:
        """Like ask(), but without waiting for busy ranks, whose answers a later call collects."""
        self._send(command)
        return self._controller.answered(self._asked) and self._hear()

    def _send(self, command: Command) -> None:
        left = [rank for rank in self._reached if rank not in self.answers]
        if left and not self._asked:
            self._asked = self._controller.start(dict.fromkeys(left, command))

    def _hear(self) -> bool:
        answers, now = self._controller.finish(self._asked), self._clock.now()
        self._asked = []
        raise_if_unwritten(self._controller, answers)
        for rank, answer in answers.items():
            if answer.progress is None:
                self.answers[rank] = answer
                continue
            file, num_bytes = answer.progress
            before, since = self._reached[rank]
            if num_bytes != before:
                self._reached[rank] = num_bytes, now
            elif now - since > self._controller.command_s:
                raise Stalled(
                    f"{self._controller.describe(rank)} has made no progress {self._doing} {file} for "
                    f"{now - since:.0f} s ({num_bytes} bytes done)"
                )
        return len(self.answers) == len(self._reached)
