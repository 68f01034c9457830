"""Metrics for an OpenTelemetry collector, by OTLP over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hpcrl
from hpcrl.metrics.trackers.spec import OTLPConfig
from hpcrl.metrics.trackers.tracker import TrackedRun


class OTLP:
    """See Tracker. A metric such as val/score/mean is the gauge hpcrl.val.score.mean, and hpcrl.step is the step; the
    resource names the run. Without `uri`, the variables OTEL_EXPORTER_OTLP_* give the address."""

    def __init__(self, run: TrackedRun, section: OTLPConfig):
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import Resource

        named = {"service.name": "hpcrl", "service.version": hpcrl.__version__}
        ran = {"hpcrl.run": run.name, "hpcrl.run_id": run.id, "hpcrl.project": run.project}
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider([self._reader], Resource.create(named | ran), shutdown_on_exit=False)
        self._meter: Any = self._provider.get_meter("hpcrl")
        self._gauges: dict[str, Any] = {}
        self._exporter = OTLPMetricExporter(endpoint=section.uri or None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        for key, value in {"step": float(step), **metrics}.items():
            name = f"hpcrl.{key.replace('/', '.')}"
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(name)
            self._gauges[name].set(value)
        data = self._reader.get_metrics_data()
        if data is not None and self._exporter.export(data) is not MetricExportResult.SUCCESS:
            raise ConnectionError("the collector did not take the metrics; the log of rank 0 has its answer")

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """OTLP's metrics are numbers only."""

    def image(self, name: str, path: Path) -> None:
        """OTLP's metrics are numbers only."""

    def close(self) -> str:
        self._provider.shutdown()
        self._exporter.shutdown()
        return ""
