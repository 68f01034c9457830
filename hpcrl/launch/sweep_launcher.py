"""Hydra's submitit launcher, with hpcrl's executor instead of submitit's.

hydra-submitit-launcher itself submits one job array of pickled functions. Such jobs cannot be heterogeneous and
restart without the checkpoint; without Slurm accounting it waits forever for a dead task.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
from omegaconf import OmegaConf


class SweepLauncher(BaseSubmititLauncher):
    """launch(arguments of each run, 0) submits all runs and waits for them; see HpcrlExecutor for its errors."""

    _EXECUTOR = "hpcrl"

    def __init__(self, folder: Path):
        super().__init__(submitit_folder=str(folder))
        self.config = OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}}})

    def __call__(self, sweep_overrides: Sequence[str], *place: Any) -> list[str]:
        """Called by the executor for the arguments of a run."""
        return list(sweep_overrides)
