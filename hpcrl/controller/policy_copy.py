"""A frozen copy of the policy of an earlier step, which a role has loaded from the run folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcrl.checkpoint.state import read_state
from hpcrl.controller.clients import Trainer, timed
from hpcrl.metrics.stats import Stats
from hpcrl.system.files import step_name, steps_in


class PolicyCopy:
    """The copy is the initial policy, which the role has built, until the first update.

    Args:
        name: Of the role; also the folder in the run folder, and the key in a checkpoint's state.
        load: Makes the role's ranks load the model in a folder.
    """

    def __init__(self, run_dir: Path, name: str, load: Callable[[Path], None]):
        self._run_dir, self._name, self._load = run_dir, name, load
        self._step = 0  # the policy of this step is the copy

    def update(self, step: int, trainer: Trainer) -> Stats:
        """Export this step's policy in HF layout and load it; a resumed run loads the same export."""
        start = time.perf_counter()
        trainer.export(self._folder(step))
        self._become(step)
        self._prune()
        return timed(f"time/{self._name}_update", start)

    def state_dict(self) -> dict[str, Any]:
        """The step whose policy is the copy; JSON-able."""
        return {self._name: {"step": self._step}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the copy of a checkpoint. ValueError if its folder is gone."""
        if step := self._step_of(state):
            if not self._folder(step).is_dir():
                raise ValueError(f"{self._folder(step)}, the {self._name} of this checkpoint, does not exist")
            self._become(step)

    def _become(self, step: int) -> None:
        self._load(self._folder(step))
        self._step = step

    def _prune(self) -> None:
        """Remove exports older than the copies of all checkpoints; the copy of a running save is newer."""
        root = self._run_dir / "checkpoints"
        try:
            needed = [self._step_of(read_state(root / step_name(step))) for step in steps_in(root)]
        except ValueError:  # damaged, or just removed
            return
        for step in steps_in(self._folder(0).parent):
            if step < min(needed, default=0):
                shutil.rmtree(self._folder(step), ignore_errors=True)

    def _folder(self, step: int) -> Path:
        return self._run_dir / self._name / step_name(step)

    def _step_of(self, state: dict[str, Any]) -> int:
        """The copy's step; checkpoints of earlier versions have none."""
        return int(state.get(self._name, {}).get("step", 0))
