"""The specifications of the built-in trackers, with their keys under tracking.NAME."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcrl.spec.fields import Section
from hpcrl.spec.kinds import TrackerSpec
from hpcrl.spec.problems import Problem


class MLflowConfig(Section):
    """The tracker mlflow."""

    uri: str = ""
    """Address of the MLflow server, used with tracking.online."""


def _server(config: Any) -> Iterator[Problem]:
    if config.tracking.online and not config.tracking.mlflow.uri:
        text = "tracking.mlflow.uri: tracking.online=true needs the address of the MLflow server"
        yield Problem(("tracking", "mlflow", "uri"), text, (("tracking", "online"), ("trackers",)))


TENSORBOARD = TrackerSpec(
    about="TensorBoard event files in the run folder.",
    make="hpcrl.metrics.trackers.tensorboard:TensorBoard",
    rewinds=True,
)
WANDB = TrackerSpec(about="Weights & Biases.", make="hpcrl.metrics.trackers.wandb:WandB", needs={"wandb": "wandb"})
SWANLAB = TrackerSpec(about="SwanLab.", make="hpcrl.metrics.trackers.swanlab:SwanLab", needs={"swanlab": "swanlab"})
MLFLOW = TrackerSpec(
    about="MLflow.",
    make="hpcrl.metrics.trackers.mlflow:MLflow",
    section=MLflowConfig,
    check=_server,
    needs={"mlflow": "mlflow"},
)
