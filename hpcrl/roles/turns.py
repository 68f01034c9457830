"""Trainer, critic, reference and generator of one rank take turns on its device: each gives its memory back while the
other works.

What a rank moves follows from the order of its commands alone, as everything that it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from hpcrl.control.messages import (
    Admit,
    Burst,
    Export,
    ExportCritic,
    LoadReference,
    Logprobs,
    Pull,
    TrainCritic,
    TrainStep,
    Values,
)
from hpcrl.roles.base import Role
from hpcrl.roles.generator import GeneratorRole
from hpcrl.roles.trainer import EngineRole

TURNS: dict[type, str] = {
    Logprobs: "train",
    TrainStep: "train",
    LoadReference: "train",
    Values: "train",
    TrainCritic: "train",
    Export: "train",
    ExportCritic: "train",
    Pull: "publish",
    Admit: "generate",
    Burst: "generate",
}


TRAIN_ROLES = ("trainer", "critic", "reference")
"""Roles with a training engine."""


class Turns:
    """On a rank with a training engine and a generator, if the run offloads (hpcrl.planner.host.takes_turns)."""

    def __init__(self, roles: Mapping[str, Role]):
        self._roles, self._turn, self._asleep = roles, "", False

    def enter(self, command: object) -> None:
        """The command is executed next: move memory if it begins another phase."""
        turn = TURNS.get(type(command), self._turn)
        engines = {name: cast(EngineRole, self._roles[name]).engine for name in TRAIN_ROLES if name in self._roles}
        if turn == self._turn or not engines or "generator" not in self._roles:
            return
        self._turn = turn
        generator = cast(GeneratorRole, self._roles["generator"]).engine
        if turn == "train":
            if not generator.progress():  # responses that go on after the step keep their cache
                generator.sleep()
                self._asleep = True
            for engine in engines.values():
                engine.onload()
        elif turn == "publish":
            for name, engine in engines.items():
                engine.offload(weights=name != "trainer")
            if self._asleep:
                generator.wake()
                self._asleep = False
        else:
            for engine in engines.values():
                engine.offload()
