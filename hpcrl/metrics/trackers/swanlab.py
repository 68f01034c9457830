"""SwanLab. Without network access it writes a folder per attempt, which `swanlab sync --id` joins into one run."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.metrics.trackers.tracker import TrackedRun


class SwanLab:
    """See Tracker. The package reads the API key from SWANLAB_API_KEY or the user's login."""

    def __init__(self, run: TrackedRun, section: object = None):
        import swanlab

        run.folder.mkdir(parents=True, exist_ok=True)
        self._swanlab, self._run, self._step = swanlab, run, max(run.first_step, 0)
        swanlab.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            mode="online" if run.online else "offline",
            log_dir=str(run.folder),
            config=dict(run.config),
            description=run.plan,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._swanlab.log(dict(metrics), step=step)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        texts = [self._swanlab.Text(json.dumps(dict(row), indent=1, ensure_ascii=False, default=str)) for row in rows]
        self._swanlab.log({name: texts}, step=max(step, self._step))

    def image(self, name: str, path: Path) -> None:
        self._swanlab.log({name: self._swanlab.Image(str(path))}, step=self._step)

    def close(self) -> str:
        self._swanlab.finish()
        if self._run.online:
            return ""
        folders = f"{shlex.quote(str(self._run.folder))}/run-*"
        return (
            f'for run in {folders}; do {shlex.quote(sys.executable)} -m swanlab sync --id {self._run.id} "$run"; done'
        )
