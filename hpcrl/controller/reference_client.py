"""The reference's interface for pipelines: the frozen model of the KL terms."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcrl.checkpoint.state import read_state
from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.controller.batches import BatchHandle
from hpcrl.controller.clients import Trainer, fill_logprobs, send_tokens, timed
from hpcrl.messaging import messages
from hpcrl.messaging.dispatcher import Controller
from hpcrl.metrics.stats import Stats
from hpcrl.system.files import step_name, steps_in


class Reference:
    """The reference ranks: the frozen initial policy, the policy at the last reference update
    (algorithm.ref_update_steps), or the model in reference.path. With trainer.lora and no such path, the trainer ranks
    without their adapters. Does nothing if neither algorithm nor pipeline uses a reference."""

    def __init__(self, controller: Controller, layout: RoleLayout, config: Config, run_dir: Path):
        self._controller, self._config, self._run_dir = controller, config, run_dir
        role = "trainer" if config.uses_reference and not layout.ranks["reference"] else "reference"
        self.ranks = layout.ranks[role]
        self._division, self._trainers = layout.division(role), layout.division("trainer")
        self._step = 0  # the policy of this step is the reference

    def logprobs(self, batch: BatchHandle, into: str) -> Stats:
        """Fill a token field with the reference's log-probs."""
        if not self.ranks:
            return {}
        rows = batch.rows_of("reference")
        stats = fill_logprobs(self._controller, self._config, "reference", self._division, batch, rows, into)
        if self.ranks != self._trainers.ranks:
            send_tokens(self._controller, batch, into, ("reference", self._division), ("trainer", self._trainers))
        return stats

    def fill(self, first_step: int) -> Iterator[int]:
        """Nothing: log-probs are computed in the steps. See CachedReference."""
        yield from ()

    def update(self, step: int, trainer: Trainer) -> Stats:
        """If due, export this step's policy in HF layout and load it as the reference; a resumed run loads the same
        export."""
        every = self._config.algorithm.ref_update_steps if self.ranks else None
        if every is None or step % every:
            return {}
        start = time.perf_counter()
        trainer.export(self._folder(step))
        self._load(step)
        self._prune()
        return timed("time/reference_update", start)

    def state_dict(self) -> dict[str, Any]:
        """The step whose policy is the reference; JSON-able."""
        return {"reference": {"step": self._step}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. ValueError if the reference's folder is gone."""
        step = _step_of(state)
        if step and self.ranks:
            if not self._folder(step).is_dir():
                raise ValueError(f"{self._folder(step)}, the reference of this checkpoint, does not exist")
            self._load(step)

    def _load(self, step: int) -> None:
        load, more_s = messages.LoadReference(str(self._folder(step))), self._config.timeouts.start_s
        self._controller.call(dict.fromkeys(self.ranks, load), more_s)
        self._step = step

    def _prune(self) -> None:
        """Remove exports older than the references of all checkpoints; the reference of a running save is newer."""
        root = self._run_dir / "checkpoints"
        try:
            needed = [_step_of(read_state(root / step_name(step))) for step in steps_in(root)]
        except ValueError:  # damaged, or just removed
            return
        for step in steps_in(self._folder(0).parent):
            if step < min(needed, default=0):
                shutil.rmtree(self._folder(step), ignore_errors=True)

    def _folder(self, step: int) -> Path:
        return self._run_dir / "reference" / step_name(step)


def _step_of(state: dict[str, Any]) -> int:
    """The reference's step; checkpoints of earlier versions have none."""
    return int(state.get("reference", {}).get("step", 0))
