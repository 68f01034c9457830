"""Trackers with the present values of a run: Prometheus and OpenTelemetry, with their own libraries as clients."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrl.commands import track
from hpcrl.config import Config, ConfigError, parse
from hpcrl.controller.tracking import start_trackers
from hpcrl.metrics.log import MetricsLog
from hpcrl.metrics.trackers.prometheus import Prometheus
from hpcrl.metrics.trackers.spec import PrometheusConfig
from hpcrl.metrics.trackers.tracker import TrackedRun
from hpcrl.system.exit_codes import ExitCode


def config_of(tracker: str, **tracking: Any) -> Config:
    return parse({"run_name": "tracked", "trackers": [tracker], "tracking": tracking})


def run_in(folder: Path) -> TrackedRun:
    return TrackedRun("tracked", "hpcrl", "1a2b", folder, folder / "trackers" / "prometheus", 0, False, {}, "")


def values_of(text: str) -> dict[tuple[str, str], float]:
    """(name, key) -> value, as Prometheus's own parser reads them."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert (sample.labels["run"], sample.labels["run_id"]) == ("tracked", "1a2b")
            found[sample.name, sample.labels["key"]] = sample.value
    return found


def test_prometheus_reads_the_newest_step_from_port_and_file(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    tracker = Prometheus(run_in(tmp_path), PrometheusConfig(port=0))
    tracker.log(0, {"val/score/mean": 0.25, "old": 1.0})
    tracker.log(1, {"val/score/mean": 0.5, "val/score_mean": 2.0})
    with urllib.request.urlopen(f"http://127.0.0.1:{tracker.port}/metrics", timeout=10) as answer:
        served = values_of(answer.read().decode())
    want = {("val_score_mean", "val/score/mean"): 0.5, ("val_score_mean", "val/score_mean"): 2.0}
    want |= {("step", ""): 1.0, ("running", ""): 1.0}
    assert served == {(f"hpcrl_{name}", key): value for (name, key), value in want.items()}
    file, port = tmp_path / "trackers" / "prometheus" / "metrics.prom", tracker.port
    assert values_of(file.read_text()) == served
    tracker.close()
    assert values_of(file.read_text()) == served | {("hpcrl_running", ""): 0.0}
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_a_port_in_use_is_named_with_its_key(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    first = Prometheus(run_in(tmp_path), PrometheusConfig(port=0))
    try:
        said = f"tracking.prometheus.port={first.port} of .* cannot be used: Address already in use; use another"
        with pytest.raises(OSError, match=said):
            Prometheus(run_in(tmp_path), PrometheusConfig(port=first.port))
    finally:
        first.close()


def test_without_a_port_nothing_listens_and_the_file_may_be_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    tracker = Prometheus(run_in(tmp_path), PrometheusConfig(textfile=str(tmp_path / "textfile" / "hpcrl.prom")))
    tracker.log(3, {"x": 1.5})
    assert tracker.port is None
    assert values_of((tmp_path / "textfile" / "hpcrl.prom").read_text())["hpcrl_x", "x"] == 1.5


class Collector:
    """An HTTP server that keeps what OTLP sends."""

    def __init__(self) -> None:
        self.status, self.requests = 200, list[Any]()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/metrics"
                collector.requests.append(ExportMetricsServiceRequest.FromString(body))
                self.send_response(collector.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self.server.server_port}/v1/metrics"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def steps(self) -> list[dict[str, float]]:
        """The gauges of each request, of which each must name the run."""
        found = []
        for request in self.requests:
            [resource] = request.resource_metrics
            named = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
            assert (named["service.name"], named["hpcrl.run"]) == ("hpcrl", "tracked")
            gauges = [metric for scope in resource.scope_metrics for metric in scope.metrics]
            found.append({metric.name: metric.gauge.data_points[0].as_double for metric in gauges})
        return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_a_collector_gets_every_step_and_no_missed_ones(tmp_path: Path, collector: Collector) -> None:
    config = config_of("otlp", online=True, otlp={"uri": collector.uri})
    for resume_step, last in ((-1, 2), (1, 3)):  # the second attempt resumes from the checkpoint of step 1
        log = MetricsLog(tmp_path, resume_step, 5, trackers=lambda at=resume_step: start_trackers(config, tmp_path, at))
        for step in range(resume_step + 1, last + 1):
            log.log(step, {"val/score/mean": step / 4})
        assert log.close() == []
        (tmp_path / "metrics.jsonl").unlink()
    steps = [0, 1, 2, 2, 3]
    assert collector.steps() == [{"hpcrl.step": float(step), "hpcrl.val.score.mean": step / 4} for step in steps]


def test_a_collector_that_refuses_ends_the_tracker_with_a_warning(
    tmp_path: Path, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 403
    config = config_of("otlp", online=True, otlp={"uri": collector.uri})
    log = MetricsLog(tmp_path, -1, 5, trackers=lambda: start_trackers(config, tmp_path, -1))
    log.log(0, {"x": 1.0})
    log.close()
    assert "the tracker otlp failed: ConnectionError: the collector did not take the metrics" in caplog.text


def test_otlp_needs_the_network() -> None:
    with pytest.raises(ConfigError, match=r"otlp sends metrics over the network during the run; set tracking\.online"):
        config_of("otlp")


@pytest.mark.parametrize("name", ["prometheus", "otlp"])
def test_a_finished_run_is_not_uploaded(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_of("tensorboard").model_dump(mode="json")))
    assert track.main([str(tmp_path), name]) == ExitCode.BAD_INPUT
    assert f"{name} has only present values" in capsys.readouterr().err
