"""Hydra's submitit launcher, with hpcrl's executor in place of submitit's own.

What hydra-submitit-launcher submits by itself is one job array of pickled functions: not heterogeneous, restarted by
submitit and not from the run folder's checkpoint, and without accounting it waits for ever for a task that died.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
from omegaconf import OmegaConf


class SweepLauncher(BaseSubmititLauncher):
    """launch(words of each run, 0) submits all of them and waits for them; see HpcrlExecutor for what it raises."""

    _EXECUTOR = "hpcrl"

    def __init__(self, folder: Path):
        super().__init__(submitit_folder=str(folder))
        self.config = OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}}})

    def __call__(self, sweep_overrides: Sequence[str], *place: Any) -> list[str]:
        """What the executor calls for the words of a run."""
        return list(sweep_overrides)
