"""Stand-ins for the half of a step that a debug mode leaves out; pipelines call them as they call the real ones."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.control.controller import Controller
from hpcrl.control.messages import LoadRollouts
from hpcrl.metrics.stats import Stats, scalar
from hpcrl.rollout.store import RolloutReader
from hpcrl.rollout.types import Sizes
from hpcrl.runtime.batches import BatchHandle, lay_out
from hpcrl.runtime.parts import Trainer, Weights, timed


class IdleTrainer(Trainer):
    """debug=rollout_only: gets the batches, tells their rewards and lengths, writes and saves, and learns nothing."""

    def logprobs(self, batch: BatchHandle, into: str) -> Stats:
        """Leaves the field as it is."""
        return {}

    def update(self, batch: BatchHandle) -> Stats:
        """Leaves the weights as they are."""
        return {}


class FixedWeights(Weights):
    """debug=rollout_only: they do not change, so that replicas get them once."""

    _published = False

    def publish(self, version: int) -> Stats:
        """As Weights.publish() the first time, then nothing."""
        if self._published:
            return {}
        self._published = True
        return super().publish(version)


class StoredRollouts:
    """debug=train_only: the stream of batches comes from the rollout store of another run, the same step's each."""

    def __init__(self, controller: Controller, layout: RoleLayout, config: Config):
        assert config.rollouts is not None, "checked by hpcrl.config"
        self._controller, self._layout, self._config = controller, layout, config
        self._run_dir = Path(config.rollouts).absolute()
        self._reader = RolloutReader(self._run_dir, provisional=True)
        self.stats: Stats = {}

    def next(self, step: int) -> BatchHandle:
        """The batch of this step, laid out over the ranks of this run, which read it themselves. ValueError names a
        file that is damaged or missing."""
        start = time.perf_counter()
        sizes = {sample: Sizes(*counts) for sample, counts in self._reader.sizes(step).items()}
        handle = lay_out(self._config, self._layout, step, sizes)
        wanted = handle.rows | handle.reference_rows
        loads = {rank: LoadRollouts(handle.id, str(self._run_dir), step, rows) for rank, rows in wanted.items()}
        trainers, references = self._layout.division("trainer"), self._layout.division("reference")
        self._controller.call(references.spread(loads) | trainers.spread(loads))
        counted = {"_tokens": scalar(sum(size.total for size in sizes.values())), "_samples": scalar(len(sizes))}
        self.stats = timed("time/step_read", start) | counted
        return handle

    def store(self, batch: BatchHandle, trainer: Trainer) -> None:
        """They are stored already."""

    def state_dict(self) -> dict[str, Any]:
        """Which rollouts a step trains on follows from the step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    def held(self) -> dict[int, list[int]]:
        """No rank holds anything of it."""
        return {}
