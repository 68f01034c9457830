"""MLflow, through its client only: a server (tracking.mlflow.uri), or a file store in the run folder."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hpcrl.metrics.trackers.spec import MLflowConfig
from hpcrl.metrics.trackers.tracker import TrackedRun, flat
from hpcrl.system.files import write_durably

MAX_METRICS, MAX_PARAMS, MAX_PARAM_CHARS = 1000, 100, 6000
"""Limits of one call of the client, and of a value."""


class MLflow:
    """See Tracker. MLflow chooses its run's id, which is kept in run_id in the tracker's folder for later attempts."""

    def __init__(self, run: TrackedRun, section: MLflowConfig):
        if not run.online or (section.uri or "").startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses its file store otherwise
        from mlflow import MlflowClient

        run.folder.mkdir(parents=True, exist_ok=True)
        self._run, uri = run, section.uri if run.online else (run.folder / "store").as_uri()
        self._client: Any = MlflowClient(tracking_uri=uri)
        kept = run.folder / "run_id"
        if kept.is_file():
            self._id = kept.read_text()
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        self._id = str(self._client.create_run(experiment_id, run_name=run.name).info.run_id)
        write_durably(kept, self._id.encode())
        self._client.log_text(self._id, json.dumps(run.config, indent=1, default=str), "config.json")
        self._client.log_text(self._id, run.plan, "plan.txt")
        self._log_params(run.config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now, entries = int(time.time() * 1000), iter(metrics.items())
        while part := [Metric(name, value, now, step) for name, value in islice(entries, MAX_METRICS)]:
            self._client.log_batch(self._id, metrics=part)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        text = json.dumps([dict(row) for row in rows], indent=1, ensure_ascii=False, default=str)
        self._client.log_text(self._id, text, f"{name}_{step:06d}.json")

    def image(self, name: str, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def close(self) -> str:
        self._client.set_terminated(self._id)
        if self._run.online:
            return ""
        return f"python -m hpcrl track {shlex.quote(str(self._run.run_dir))} mlflow http://SERVER:5000"

    def _log_params(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        entries = iter(flat(config).items())
        while part := [Param(name, value[:MAX_PARAM_CHARS]) for name, value in islice(entries, MAX_PARAMS)]:
            self._client.log_batch(self._id, params=part)
