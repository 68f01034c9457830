"""Training engines and the generator of one rank take turns on its device: each side releases memory while the other
works. As with everything that a rank does, offloading depends only on the order of the rank's commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from hpcrl.cluster.layout import ENGINE_ROLES
from hpcrl.messaging.messages import (
    Admit,
    BuildRole,
    DecodeChunk,
    Export,
    ExportCritic,
    LoadReference,
    LoadState,
    LoadTeacher,
    Logprobs,
    Teach,
    TrainCritic,
    TrainStep,
    UpdateWeights,
    Values,
)
from hpcrl.workers.generator import GeneratorRole
from hpcrl.workers.role import Role
from hpcrl.workers.trainer import EngineRole

PHASE_OF: dict[type, str] = {
    Logprobs: "train",
    Teach: "train",
    TrainStep: "train",
    LoadReference: "train",
    LoadTeacher: "train",
    LoadState: "train",
    Values: "train",
    TrainCritic: "train",
    Export: "train",
    ExportCritic: "train",
    UpdateWeights: "publish",
    Admit: "generate",
    DecodeChunk: "generate",
}


class TimeSharing:
    """Exists on a rank with a training engine and a generator if the run offloads (hpcrl.planner.memory.shares_device).

    Training engines are offloaded before the generator is built, since its engine may allocate a fraction of GPU memory
    at once. With `shares_weights` (hpcrl.planner.generator), the generator reads the trainer's parameters, which then
    stay on the device.
    """

    def __init__(self, roles: Mapping[str, Role], shares_weights: bool = False):
        self._roles, self._shares_weights = roles, shares_weights
        self._turn, self._asleep = "", False

    def enter(self, command: object) -> None:
        """Called before each command. Offloads and onloads if the command begins another phase."""
        built = [name for name in ENGINE_ROLES if name in self._roles]
        engines = [(name, engine) for name in built for engine in cast(EngineRole, self._roles[name]).engines]
        if isinstance(command, BuildRole):
            if command.role == "generator":
                self._turn = "generate"
                for _, engine in engines:
                    engine.offload(weights=not self._shares_weights)
            return
        turn = PHASE_OF.get(type(command), self._turn)
        if turn == self._turn or not engines or "generator" not in self._roles:
            return
        generator = cast(GeneratorRole, self._roles["generator"]).engine
        if turn == "train" or self._turn == "generate":  # weights to publish may be on the host
            if not generator.progress():  # responses that continue after the step keep their cache
                generator.sleep()
                self._asleep = True
            for _, engine in engines:
                engine.onload()
        self._turn = turn
        if turn == "publish":
            for name, engine in engines:
                engine.offload(weights=name != "trainer")
            if self._asleep:
                generator.wake()
                self._asleep = False
        elif turn == "generate":
            for _, engine in engines:
                engine.offload()
