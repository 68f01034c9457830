"""Replacements for the parts of a step that a debug mode omits, with the interfaces of the real parts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hpcrl.cluster.layout import ENGINE_ROLES, RoleLayout
from hpcrl.config import Config
from hpcrl.controller.batches import BatchHandle, lay_out
from hpcrl.controller.clients import Trainer, Weights, timed
from hpcrl.messaging.dispatcher import Controller
from hpcrl.messaging.messages import LoadRollouts
from hpcrl.metrics.stats import Stats, scalar
from hpcrl.rollout.preferences import preferences
from hpcrl.rollout.store import RolloutReader
from hpcrl.rollout.types import Sizes


class IdleTrainer(Trainer):
    """debug=rollout_only: receives batches, reports their rewards and lengths, writes and saves, but does not train."""

    def logprobs(self, batch: BatchHandle, into: str) -> Stats:
        """Does not change the field."""
        return {}

    def update(self, batch: BatchHandle) -> Stats:
        """Does not change the weights."""
        return {}


class FixedWeights(Weights):
    """debug=rollout_only: the weights do not change, so replicas get them once."""

    _published = False

    def update_weights(self, version: int) -> Stats:
        """Like Weights.update_weights() the first time, then does nothing."""
        if self._published:
            return {}
        self._published = True
        return super().update_weights(version)


class StoredRollouts:
    """debug=train_only: reads each step's batch from the same step in another run's rollout store."""

    def __init__(self, controller: Controller, layout: RoleLayout, config: Config):
        assert config.load_rollouts is not None, "checked by hpcrl.config"
        self._controller, self._layout, self._config = controller, layout, config
        self._run_dir = Path(config.load_rollouts).absolute()
        self._reader = RolloutReader(self._run_dir, provisional=True)
        self.stats: Stats = {}

    def next(self, step: int) -> BatchHandle:
        """This step's batch; the ranks read their parts themselves. ValueError names a damaged or missing file."""
        start = time.perf_counter()
        sizes = {sample: Sizes(*counts) for sample, counts in self._reader.sizes(step).items()}
        judged = self._reader.rewards(step) if self._config.pairs_per_group else {}
        chosen = preferences(judged, self._config.pairs_per_group)
        handle = lay_out(self._config, self._layout, step, sizes, chosen)
        handle.domains = self._reader.domains(step)
        wanted = handle.all_rows
        loads = {rank: LoadRollouts(handle.id, str(self._run_dir), step, rows) for rank, rows in wanted.items()}
        divisions = [self._layout.division(role) for role in ENGINE_ROLES]
        self._controller.call(
            {rank: load for division in divisions for rank, load in division.replicate(loads).items()}
        )
        counted = {"_tokens": scalar(sum(size.total for size in sizes.values())), "_samples": scalar(len(sizes))}
        self.stats = timed("time/step_read", start) | counted
        return handle

    def store(self, batch: BatchHandle, trainer: Trainer) -> None:
        """Does nothing: the rollouts are already stored."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: the step determines its rollouts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    def held(self) -> dict[int, list[int]]:
        """Empty: no rank holds samples."""
        return {}
