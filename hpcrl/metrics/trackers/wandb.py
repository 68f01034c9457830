"""Weights & Biases. Without network access it writes a folder per attempt; `wandb sync` joins them by the run's id."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.metrics.trackers.tracker import TrackedRun


class WandB:
    """See Tracker. The package reads the API key from WANDB_API_KEY or the user's netrc."""

    def __init__(self, run: TrackedRun, section: object = None):
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        self._wandb, self._run = wandb, run
        self._step = max(run.first_step, 0)
        self._session = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            mode="online" if run.online else "offline",
            dir=str(run.folder),
            config=dict(run.config),
            notes=run.plan,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
            ),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._session.log(dict(metrics), step=step)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns: list[Any] = list(rows[0]) if rows else []
        data = [[str(row[column]) for column in columns] for row in rows]
        self._session.log({name: self._wandb.Table(columns=columns, data=data)}, step=max(step, self._step))

    def image(self, name: str, path: Path) -> None:
        self._session.log({name: self._wandb.Image(str(path))}, step=self._step)

    def close(self) -> str:
        self._session.finish()
        self._wandb.teardown()  # waits for wandb's own process, which otherwise writes its last records later
        if self._run.online:
            return ""
        wandb = shlex.quote(str(Path(sys.executable).with_name("wandb")))
        return f"{wandb} sync {shlex.quote(str(self._run.folder / 'wandb'))}/offline-run-*"
