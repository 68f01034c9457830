"""Trackers: one run over all attempts, nothing twice, and no tracker can block or end a run."""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from hpcrl.commands import track
from hpcrl.config import Config, ConfigError, parse
from hpcrl.config.abilities import check_installed
from hpcrl.controller.examples import keep_examples
from hpcrl.controller.tracking import last_step_file, start_trackers
from hpcrl.metrics.log import MetricsLog, read_metrics
from hpcrl.metrics.trackers.thread import TrackerThread, log_missed
from hpcrl.metrics.trackers.tracker import TrackedRun
from hpcrl.spec.fields import Section
from hpcrl.spec.kinds import TrackerSpec
from hpcrl.spec.tables import TRACKERS
from hpcrl.system.exit_codes import ExitCode


class Recorder:
    """A tracker that keeps what is logged, and fails at one step."""

    def __init__(self, seen: list[tuple[int, Mapping[str, float]]], fails_at: int | None = None):
        self.seen, self.fails_at, self.others = seen, fails_at, list[str]()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("no server")
        self.seen.append((step, metrics))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.others.append(name)

    def image(self, name: str, path: Path) -> None:
        self.others.append(name)

    def close(self) -> str:
        return "sync it"


class Attempt:
    """An attempt of a run that resumes at a step, with one tracker."""

    def __init__(self, folder: Path, resume_step: int, make: Callable[[int], Any], rewinds: bool = False, timeout_s=60):
        self.warnings: list[str] = []
        told = folder / "trackers" / "own.told"
        told.parent.mkdir(exist_ok=True)
        self.thread = TrackerThread("own", make, told, resume_step, rewinds, timeout_s, self.warnings.append)
        self.log = MetricsLog(folder, resume_step, 100, trackers=lambda: [self.thread])

    def steps(self, first: int, last: int, value: float) -> Attempt:
        for step in range(first, last + 1):
            self.log.log(step, {"x": value})
        return self


@pytest.mark.parametrize(("rewinds", "values"), [(False, [1, 1, 1, 1, 1, 2]), (True, [1, 1, 1, 1, 1, 2, 2, 2])])
def test_steps_after_the_checkpoint_are_not_logged_twice(tmp_path: Path, rewinds: bool, values: list[float]) -> None:
    """Except by a tracker that can delete steps, which gets the first step to delete."""
    seen: list[Any] = []
    firsts: list[int] = []

    def make(first: int) -> Recorder:
        firsts.append(first)
        return Recorder(seen)

    assert Attempt(tmp_path, -1, make, rewinds).steps(0, 4, 1.0).log.close() == ["sync it"]
    rows = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(rows[:3]))  # the checkpoint is of step 2
    attempt = Attempt(tmp_path, 2, make, rewinds).steps(3, 5, 2.0)
    assert attempt.log.close() == ["sync it"] and attempt.warnings == []
    assert [metrics["x"] for _, metrics in seen] == values
    assert [step for step, _ in seen] == [0, 1, 2, 3, 4, *([3, 4] if rewinds else []), 5]
    assert firsts == [0, 3 if rewinds else 5]


def test_a_failing_tracker_causes_a_warning_and_gets_missed_steps_later(tmp_path: Path) -> None:
    seen: list[Any] = []
    attempt = Attempt(tmp_path, -1, lambda _: Recorder(seen, fails_at=2)).steps(0, 5, 1.0)
    assert attempt.log.close() == []
    [warning] = attempt.warnings
    assert warning == (
        "the tracker own failed: ConnectionError: no server; the run continues without it, metrics.jsonl has every step"
    )
    assert len(read_metrics(tmp_path)) == 6 and [step for step, _ in seen] == [0, 1]
    assert Attempt(tmp_path, 5, lambda _: Recorder(seen)).steps(6, 6, 1.0).log.close() == ["sync it"]
    assert [step for step, _ in seen] == list(range(7))


@pytest.mark.parametrize("where", ["start", "log"])
def test_a_hanging_tracker_causes_only_a_warning(tmp_path: Path, where: str) -> None:
    """No step waits for it, and neither does the end."""
    forever = threading.Event()

    class Hanging(Recorder):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            forever.wait()

    def make(_: int) -> Recorder:
        if where == "start":
            forever.wait()
        return Hanging([])

    attempt, step = Attempt(tmp_path, -1, make, timeout_s=0.2), 0
    while not attempt.warnings and step < 10_000:
        attempt.log.log(step, {"x": 1.0})
        time.sleep(0.01)
        step += 1
    assert len(read_metrics(tmp_path)) == step and attempt.log.close() == []
    [warning] = attempt.warnings
    assert "did not answer within tracking.timeout_s=0.2" in warning
    forever.set()


def test_a_tracker_hanging_at_the_end_is_abandoned(tmp_path: Path) -> None:
    forever = threading.Event()

    class Hanging(Recorder):
        def close(self) -> str:
            forever.wait()
            return "sync it"

    attempt = Attempt(tmp_path, -1, lambda _: Hanging([])).steps(0, 0, 1.0)
    assert attempt.log.close(within_s=0.2) == []
    assert ["did not end within 0.2 s" in warning for warning in attempt.warnings] == [True]
    forever.set()


# -- the configuration


def config_of(**keys: Any) -> Config:
    return parse({"data": {"train": "rows.jsonl"}, "run_name": "tracked", **keys})


def test_a_tracker_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"trackers.*'prometheus' or 'otlp'"):
        config_of(trackers=["wandbb"])
    monkeypatch.setattr("hpcrl.spec.kinds.find_spec", lambda module: None)
    problems = [problem.text for problem in check_installed(config_of(trackers=["tensorboard", "swanlab"]))]
    [text] = [text for text in problems if text.startswith("trackers")]
    assert text.startswith("trackers.1: swanlab is not installed; ") and "constraints.txt 'swanlab==0.10.*'" in text


def test_a_networked_tracker_requires_a_server() -> None:
    with pytest.raises(ConfigError, match=r"tracking\.mlflow\.uri: tracking\.online=true needs the address"):
        config_of(trackers=["mlflow"], tracking={"online": True})


class LinesConfig(Section):
    """Keys of a custom tracker."""

    end: str = ";"
    """After each value."""


class Lines(Recorder):
    def __init__(self, run: TrackedRun, section: LinesConfig):
        super().__init__([])
        self._file, self._end = run.run_dir / "lines", section.end

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._file.open("a") as file:
            file.write(f"{metrics['x']}{self._end}")


LINES = TrackerSpec(about="Lines.", make=f"{__name__}:Lines", section=LinesConfig, name="lines")


def test_a_tracker_given_by_its_path_has_its_own_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{__name__}:LINES"
    config = config_of(trackers=[path], tracking={"lines": {"end": "\n"}})
    log = MetricsLog(tmp_path, -1, 100, trackers=lambda: start_trackers(config, tmp_path, -1))
    log.log(0, {"x": 0.5})
    log.close()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_of().model_dump(mode="json")))
    assert track.main([str(tmp_path), path]) == ExitCode.DONE
    assert (tmp_path / "lines").read_text() == "0.5\n0.5;"
    wrong = {"wandbb": "did you mean wandb?", f"{path}x": "LINESx", f"{path} http://x": "takes no address"}
    for words, text in wrong.items():
        assert track.main([str(tmp_path), *words.split()]) == ExitCode.BAD_INPUT and text in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"trackers\.0: .*LINESx"):
        config_of(trackers=[f"{path}x"])
    with pytest.raises(ConfigError, match=r"tracking\.lines\.start"):
        config_of(trackers=[path], tracking={"lines": {"start": ""}})


# -- real ones, where they are installed

LIVE = {name for name, spec in TRACKERS.items() if spec.live}  # tests/metrics/test_live_trackers.py

METRICS = [{"critic/rewards/mean": step / 4, "actor/lr": 1e-6} for step in range(6)]
PLAN = "run     tracked, 5 steps"
ROWS = [{"step": 5, "prompt": "2+2", "response": "| <script> `4`", "score": 1.0}]


def two_attempts(folder: Path, name: str) -> list[str]:
    """Log steps 0 to 3, then from the checkpoint of step 1 to the end; returns upload hints."""
    pytest.importorskip(name)
    config = config_of(trackers=[name])
    (folder / "plan.txt").write_text(PLAN)
    Image.new("RGB", (8, 8)).save(folder / "plot.png")
    hints: list[str] = []
    for resume_step, last in ((-1, 3), (1, 5)):
        path = folder / "metrics.jsonl"
        if path.exists():
            path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[: resume_step + 1]))
        log = MetricsLog(folder, resume_step, 5, trackers=lambda at=resume_step: start_trackers(config, folder, at))
        for step in range(resume_step + 1, last + 1):
            log.log(step, METRICS[step])
        log.call_trackers(lambda tracker, last=last: tracker.table("examples", last, [ROWS[0] | {"step": last}]))
        log.call_trackers(lambda tracker: tracker.image("plot", folder / "plot.png"))
        hints = log.close()
    return hints


@pytest.mark.slow
def test_mlflow_logs_every_step_once_over_two_attempts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [hint] = two_attempts(tmp_path, "mlflow")
    assert shlex.split(hint) == ["python", "-m", "hpcrl", "track", str(tmp_path), "mlflow", "http://SERVER:5000"]
    from mlflow import MlflowClient

    def check(store: Path) -> None:
        client = MlflowClient(tracking_uri=store.as_uri())
        [experiment] = client.search_experiments(filter_string="name = 'hpcrl'")
        [run] = client.search_runs([experiment.experiment_id])
        entries = client.get_metric_history(run.info.run_id, "critic/rewards/mean")
        assert sorted((entry.step, entry.value) for entry in entries) == [(step, step / 4) for step in range(6)]
        assert run.data.params["run_name"] == "tracked" and run.info.status == "FINISHED"
        files = [entry.path for entry in client.list_artifacts(run.info.run_id)]
        told = {path: Path(client.download_artifacts(run.info.run_id, path)).read_bytes() for path in files}
        assert told["plan.txt"] == PLAN.encode() and told["plot.png"].startswith(b"\x89PNG")
        assert json.loads(told["examples_000005.json"]) == ROWS

    check(tmp_path / "trackers" / "mlflow" / "store")
    keep_examples(tmp_path, 5, [{name: value for name, value in ROWS[0].items() if name != "step"}], [()])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_of().model_dump(mode="json")))
    for _ in range(2):  # existing entries are not logged again
        assert track.main([str(tmp_path), "mlflow", (tmp_path / "server").as_uri()]) == ExitCode.DONE
    check(tmp_path / "server")
    assert "mlflow has the 6 rows" in capsys.readouterr().out


def records_of(log: bytes) -> Iterator[bytes]:
    """The records of a file of wandb: LevelDB's log, whose blocks of 32 KiB hold parts with a header of 7 bytes."""
    at, record = 7, b""
    while len(log) - at >= 7:
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        record += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_logs_every_step_once_over_two_attempts(tmp_path: Path) -> None:
    [hint] = two_attempts(tmp_path, "wandb")
    assert hint.endswith(f"wandb sync {tmp_path}/trackers/wandb/wandb/offline-run-*")
    from wandb.proto.wandb_internal_pb2 import Record

    steps, ids, shown = [], set(), {}
    for path in sorted((tmp_path / "trackers/wandb/wandb").glob("offline-run-*/run-*.wandb")):
        for data in records_of(path.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                assert record.run.notes == PLAN
            logged = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            shown |= logged
            if "critic/rewards/mean" in logged:
                steps.append(record.history.step.num)
    assert steps == list(range(6)), "every step once over both attempts"
    [table] = (tmp_path / "trackers/wandb/wandb").glob(f"offline-run-*/files/{json.loads(shown['examples/path'])}")
    assert json.loads(table.read_text())["data"] == [[str(value) for value in ROWS[0].values()]]
    assert json.loads(shown["plot/_type"]) == "image-file"
    assert ids == {(tmp_path / "trackers" / "run_id").read_text()}


@pytest.mark.slow
def test_swanlab_logs_every_step_once_over_two_attempts(tmp_path: Path) -> None:
    [hint] = two_attempts(tmp_path, "swanlab")
    run_id = (tmp_path / "trackers" / "run_id").read_text()
    assert f"sync --id {run_id}" in hint
    folder = tmp_path / "trackers" / "swanlab"
    records = list(folder.glob(f"run-*/run-{run_id}.swanlab"))
    assert len(records) == 2 and all(PLAN.encode() in path.read_bytes() for path in records)
    [shown] = folder.glob("run-*/media/text/005-*.txt")
    assert json.loads(shown.read_text()) == ROWS[0] and list(folder.glob("run-*/media/image/005-*.png"))


@pytest.mark.slow
def test_tensorboard_tables_escape_response_text(tmp_path: Path) -> None:
    two_attempts(tmp_path, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("critic/rewards/mean")] == list(range(6))
    text = board.Tensors("examples/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "| 5 | 2+2 | &#124; &lt;script> &#96;4&#96; | 1.0 |" in text
    assert PLAN in board.Tensors("plan/text_summary")[0].tensor_proto.string_val[0].decode()
    assert board.Images("plot")[-1].width == 8
    assert set(TRACKERS) - LIVE == {"tensorboard", "wandb", "swanlab", "mlflow"}, "each has a test above"


@pytest.mark.slow
def test_a_run_longer_than_queue_and_timeout_is_logged_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcrl.metrics.trackers.thread.MAX_WAITING", 5)

    class Slow(Recorder):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            time.sleep(0.05)
            super().log(step, metrics)

    seen: list[Any] = []
    warnings: list[str] = []
    thread = TrackerThread("own", lambda _: Slow(seen), tmp_path / "own.told", -1, False, 1.0, warnings.append)
    log_missed([thread], [{"step": step, "x": 1.0} for step in range(30)])
    thread.drain()
    assert thread.close(1.0) == "sync it" and [step for step, _ in seen] == list(range(30)) and not warnings


def test_every_tracker_tracks_its_own_last_step(tmp_path: Path) -> None:
    names = [("a.b:FIRST", False), ("a.b:FIRST", True), ("a.c:SECOND", False), ("mlflow", False), ("mlflow", True)]
    configs = [(Config(tracking={"online": online}), name) for name, online in names]
    assert len({last_step_file(config, tmp_path, name) for config, name in configs}) == len(names)


@pytest.mark.slow
def test_hanging_trackers_share_the_time_at_the_end(tmp_path: Path) -> None:
    forever, seen = threading.Event(), list[Any]()
    makes: list[Callable[[int], Any]] = [lambda _: forever.wait(), lambda _: forever.wait(), lambda _: Recorder(seen)]
    told = [tmp_path / f"{number}.told" for number in range(3)]
    threads = [
        TrackerThread("own", make, path, -1, False, 60, lambda _: None) for make, path in zip(makes, told, strict=True)
    ]
    log = MetricsLog(tmp_path, -1, 10, trackers=lambda: threads)
    log.log(0, {"x": 1.0})
    start = time.monotonic()
    assert log.close(within_s=5.0) == ["sync it"]
    assert 4.9 < time.monotonic() - start < 9.9 and seen
    forever.set()


def test_a_tracker_can_be_given_only_once() -> None:
    with pytest.raises(ConfigError, match=r"trackers: expected every name once, mlflow is there twice"):
        parse({"trackers": ["mlflow", "wandb", "mlflow"]})
