"""The newest metrics for Prometheus: an HTTP endpoint, and a file for node_exporter's textfile collector."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.metrics.trackers.spec import PrometheusConfig
from hpcrl.metrics.trackers.tracker import TrackedRun

FILE = "metrics.prom"


class Prometheus:
    """See Tracker. A metric such as val/score/mean is the gauge hpcrl_val_score_mean with the labels run, run_id and
    key, which has the metric's own name; hpcrl_step is the step, and hpcrl_running becomes 0 at the attempt's end."""

    def __init__(self, run: TrackedRun, section: PrometheusConfig):
        from prometheus_client import CollectorRegistry, start_http_server

        self._labels = {"run": run.name, "run_id": run.id}
        self._values: Mapping[str, float] = {}
        self._step, self._running = run.first_step - 1, 1
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._file = Path(section.textfile).expanduser() if section.textfile else run.folder / FILE
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._server: Any = None
        if section.port is not None:
            try:
                self._server, _ = start_http_server(section.port, section.address, self._registry)
            except OSError as error:
                place = f"tracking.prometheus.port={section.port} of {section.address}"
                raise OSError(error.errno, f"{place} cannot be used: {error.strerror or error}; use another") from error

    @property
    def port(self) -> int | None:
        """Port of the endpoint; None without one."""
        return None if self._server is None else int(self._server.server_port)

    def collect(self) -> Iterator[Any]:
        """All gauges, for the library, which calls it in a thread of the endpoint."""
        from prometheus_client.core import GaugeMetricFamily

        names = {"hpcrl_step": [("", float(self._step))], "hpcrl_running": [("", float(self._running))]}
        for key, value in self._values.items():
            names.setdefault(f"hpcrl_{re.sub(r'[^a-zA-Z0-9_]', '_', key)}", []).append((key, value))
        for name, values in names.items():
            gauge = GaugeMetricFamily(name, "see key", labels=[*self._labels, "key"])
            for key, value in values:
                gauge.add_metric([*self._labels.values(), key], value)
            yield gauge

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, self._values = step, dict(metrics)
        self._write()

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prometheus has numbers only."""

    def image(self, name: str, path: Path) -> None:
        """Prometheus has numbers only."""

    def close(self) -> str:
        self._running = 0
        self._write()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        return ""

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        write_to_textfile(str(self._file), self._registry)  # by a new file, which replaces the old one
