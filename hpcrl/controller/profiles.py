"""Profiles of single steps, which the ranks write (hpcrl.workers.profiling)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from hpcrl.messaging.dispatcher import Controller
from hpcrl.messaging.messages import Profile

logger = logging.getLogger(__name__)


class StepProfiler:
    """Lets `ranks` profile `steps`; steps up to `first_step` have been trained before."""

    def __init__(self, controller: Controller, steps: Collection[int], ranks: Sequence[int], first_step: int):
        self._controller, self._steps, self._ranks = controller, frozenset(steps), ranks
        self._told: set[str] = set()
        if passed := [step for step in sorted(steps) if step <= first_step]:
            names = ", ".join(map(str, passed))
            logger.warning("profile.steps: no profile of steps %s: the run continues after step %d", names, first_step)

    def begin(self, step: int) -> None:
        """Called before a step."""
        if step in self._steps:
            self._call(Profile(step, begins=True))

    def end(self, step: int) -> None:
        """Called after the step. Writing may take as long as a command."""
        if step in self._steps:
            self._call(Profile(step, begins=False))

    def _call(self, command: Profile) -> None:
        answers = self._controller.call(dict.fromkeys(self._ranks, command), self._controller.command_s)
        for rank, answer in answers.items():
            for text in {*answer.texts} - self._told:
                self._told.add(text)
                logger.warning("profile of %s: %s", self._controller.describe(rank), text)
