"""Trainer and generator of one rank take turns on its device: each gives its memory back while the other works.

What a rank moves follows from the order of its commands alone, as everything that it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from hpcrl.control.messages import Admit, Burst, Export, Logprobs, Pull, TrainStep
from hpcrl.roles.base import Role
from hpcrl.roles.generator import GeneratorRole
from hpcrl.roles.trainer import TrainerRole

TURNS: dict[type, str] = {
    Logprobs: "train",
    TrainStep: "train",
    Export: "train",
    Pull: "publish",
    Admit: "generate",
    Burst: "generate",
}


class Turns:
    """On a rank with both roles, if the run offloads (hpcrl.planner.host.takes_turns)."""

    def __init__(self, roles: Mapping[str, Role]):
        self._roles, self._turn, self._asleep = roles, "", False

    def enter(self, command: object) -> None:
        """The command is executed next: move memory if it begins another phase."""
        turn = TURNS.get(type(command), self._turn)
        if turn == self._turn or not {"trainer", "generator"} <= self._roles.keys():
            return
        self._turn = turn
        trainer = cast(TrainerRole, self._roles["trainer"]).engine
        generator = cast(GeneratorRole, self._roles["generator"]).engine
        if turn == "train":
            if not generator.progress():  # responses that go on after the step keep their cache
                generator.sleep()
                self._asleep = True
            trainer.onload()
        elif turn == "publish":
            trainer.offload(weights=False)
            if self._asleep:
                generator.wake()
                self._asleep = False
        else:
            trainer.offload()
