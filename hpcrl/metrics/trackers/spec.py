"""The specifications of the built-in trackers, with their keys under tracking.NAME."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from hpcrl.spec.fields import Section
from hpcrl.spec.kinds import TrackerSpec
from hpcrl.spec.problems import Problem


class MLflowConfig(Section):
    """The tracker mlflow."""

    uri: str = ""
    """Address of the MLflow server, used with tracking.online."""


class PrometheusConfig(Section):
    """The tracker prometheus."""

    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on rank 0's node where Prometheus gets the metrics from; 0: a free port; null: none, only the file."""
    address: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address on which the port is open; 0.0.0.0: on all networks of the node, without a password."""
    textfile: str | None = None
    """File for node_exporter's textfile collector; null: metrics.prom in the tracker's folder."""


class OTLPConfig(Section):
    """The tracker otlp."""

    uri: str = ""
    """Address of the collector, such as http://HOST:4318/v1/metrics; empty: from the variables OTEL_EXPORTER_OTLP_*."""


def _collector(config: Any) -> Iterator[Problem]:
    if not config.tracking.online:
        text = "trackers: otlp sends metrics over the network during the run; set tracking.online=true"
        yield Problem(("trackers",), text, (("tracking", "online"),))


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
PROMETHEUS = TrackerSpec(
    about="Prometheus: an HTTP endpoint of rank 0, and a file for node_exporter.",
    make="hpcrl.metrics.trackers.prometheus:Prometheus",
    section=PrometheusConfig,
    live=True,
    needs={"prometheus_client": "prometheus"},
)
OTLP = TrackerSpec(
    about="A collector of OpenTelemetry, by OTLP over HTTP.",
    make="hpcrl.metrics.trackers.otlp:OTLP",
    section=OTLPConfig,
    live=True,
    check=_collector,
    needs={"opentelemetry.exporter.otlp.proto.http.metric_exporter": "otlp"},
)
