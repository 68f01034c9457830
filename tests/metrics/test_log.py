"""Metrics on disk, on TensorBoard, on the screen and in the plot."""

from __future__ import annotations

import io
import json
import logging
import math
import pty
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest

from hpcrl.checkpoint.lineage import abandon_after
from hpcrl.config import parse
from hpcrl.controller.tracking import start_trackers
from hpcrl.metrics.duration import duration
from hpcrl.metrics.log import MetricsLog, read_metrics
from hpcrl.metrics.plot import main as plot_command
from hpcrl.metrics.plot import plot
from hpcrl.metrics.progress import Progress, summary
from hpcrl.system import log
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.log import message_of
from tests.terminal import read_to_end

pytestmark = pytest.mark.usefixtures("console")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def board_scalars(run: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(name)]


def log_run(run: Path, resume_step: int, last: int, reward: float) -> str:
    screen = io.StringIO()
    trackers = partial(start_trackers, parse({"data": {"train": "rows.jsonl"}}), run, resume_step)
    with redirect_stdout(screen):
        metrics = MetricsLog(run, resume_step, max_steps=6, trackers=trackers)
        for step in range(resume_step + 1, last + 1):
            metrics.log(step, {"critic/rewards/mean": reward + step, "actor/lr": 1e-6})
        assert metrics.close() == []
    return screen.getvalue()


def test_a_resumed_run_logs_every_step_once(tmp_path: Path) -> None:
    log_run(tmp_path, -1, 5, reward=100.0)
    with pytest.raises(ValueError, match=r"metrics\.jsonl ends with step 5, past the resumed step 2"):
        MetricsLog(tmp_path, 2, max_steps=6)
    abandon_after(tmp_path, 2, attempt=2)
    screen = log_run(tmp_path, 2, 4, reward=200.0)

    rewards = {0: 100, 1: 101, 2: 102, 3: 203, 4: 204}
    rows = read_metrics(tmp_path)
    assert {row["step"]: row["critic/rewards/mean"] for row in rows} == rewards and len(rows) == len(rewards)
    assert rows[3] == {"step": 3, "critic/rewards/mean": 203.0, "actor/lr": 1e-6}
    assert board_scalars(tmp_path, "critic/rewards/mean") == list(rewards.items())
    assert [line.split("  ")[:2] for line in screen.splitlines()[:2]] == [
        ["step 3/6", "reward 203.000"],
        ["step 4/6", "reward 204.000"],
    ]


def test_non_finite_values_are_stored_as_null_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = MetricsLog(tmp_path, -1, max_steps=2)
    metrics.log(1, {"actor/grad_norm": math.nan, "critic/kl": -math.inf, "critic/rewards/mean": 0.5})
    with pytest.raises(AssertionError, match="step 1 is logged after step 1"):
        metrics.log(1, {})
    metrics.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line == '{"step": 1, "actor/grad_norm": null, "critic/kl": null, "critic/rewards/mean": 0.5}\n'
    assert "step 1: not finite: actor/grad_norm = nan, critic/kl = -inf\n" in capsys.readouterr().out


def test_lines_that_are_not_rows_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "x"')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"stp": 2}\n{"step": 5, "x"{"step": 2}\n7\n{"step": 3}\n')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 3]
    assert read_metrics(tmp_path / "nowhere") == []


def test_time_left_does_not_jump_at_an_evaluation() -> None:
    """1 s per step; an evaluation every 3 steps and after the last takes 30 s."""
    now, screen = [0.0], io.StringIO()
    progress = Progress(0, 10, screen, clock=lambda: now[0], eval_every=3)
    left = []
    for step in range(11):
        evaluated = step % 3 == 0 or step == 10
        now[0] += (step > 0) + 30.0 * evaluated
        with redirect_stdout(screen):
            progress.update(step, {"time/val_step": 30.0} if evaluated else {})
        left.append(screen.getvalue().splitlines()[-1].partition("ETA ")[2])
    assert left[0] == "", "no step has been timed yet"
    assert left[1:] == [duration(10 - step + 30 * (4 - step // 3)) for step in range(1, 10)] + ["0 s"]


def lines_of(first_step: int, max_steps: int, steps: list[tuple[int, float]]) -> list[str]:
    """Progress lines of steps finished at given seconds after the start."""
    now, screen = [0.0], io.StringIO()
    progress = Progress(first_step, max_steps, screen, clock=lambda: now[0])
    for step, seconds in steps:
        now[0] = seconds
        with redirect_stdout(screen):
            progress.update(step, {})
    return screen.getvalue().splitlines()


def test_time_left_uses_the_steps_and_rate_of_this_attempt() -> None:
    # 2 s per step, 10 steps of 100 left; steps of the earlier attempt neither slow nor speed it.
    assert lines_of(80, 100, [(80 + n, 2.0 * n) for n in range(1, 11)])[-1] == "step 90/100  ETA 20 s"
    # An evaluation before the first step took 60 s and is not a step.
    assert lines_of(0, 100, [(0, 60.0), (1, 61.0), (2, 62.0)]) == [
        "step 0/100  starting",
        "step 1/100  ETA 1 min 39 s",
        "step 2/100  ETA 1 min 38 s",
    ]
    # The rate is that of the recent steps: a first step of 1000 s is forgotten.
    assert lines_of(0, 1000, [(n, 1000.0 + n) for n in range(1, 41)])[-1] == "step 40/1000  ETA 16 min 00 s"


def test_durations_are_formatted_readably() -> None:
    assert [duration(s) for s in (0.4, 59.4, 59.6, 200, 3599.7, 7500)] == [
        "0 s",
        "59 s",
        "1 min 00 s",
        "3 min 20 s",
        "1 h 00 min",
        "2 h 05 min",
    ]


def test_the_last_evaluation_stays_on_a_terminal() -> None:
    screen = Terminal()
    progress = Progress(0, 10, screen)
    progress.update(0, {"val/score/mean": 0.46})
    progress.update(1, {"critic/rewards/mean": 0.25, "system/tps": 1234.5})
    progress.close()
    shown = screen.getvalue()
    assert "step 1/10" in shown and "reward 0.250  validation 0.460  tokens/s 1,234" in shown


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_progress_bar_is_one_terminal_line(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages appear above it, and the steps that it shows are in the log."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    ours, terminal = pty.openpty()
    with ThreadPoolExecutor(1) as reader, open(terminal, "w") as screen:
        sent = reader.submit(read_to_end, ours)
        log.start("rank 0", file=tmp_path / "rank_0000.log", console="stdout")
        monkeypatch.setattr(sys, "stdout", screen)
        progress = Progress(0, 120, screen)
        for step in range(0, 121, 20):
            progress.update(step, {"critic/rewards/mean": 0.5, "val/score/mean": 0.46, "system/tps": 12345.6})
        logging.getLogger("hpcrl.metrics").warning("a line [that] stays")
        progress.close()
        monkeypatch.undo()
    shown = sent.result()
    assert "\x1b[1A" not in shown, "the cursor goes up where a bar takes more than one line"
    kept = [line.rsplit("\r\x1b[2K", 1)[-1] for line in shown.split("\r\n")]
    kept = [re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", line) for line in kept]
    assert [line.split("\u2501")[0].rstrip() for line in kept] == ["hpcrl: a line [that] stays", "step 120/120", ""], (
        kept
    )
    assert max(map(len, kept)) <= columns
    logged = (tmp_path / "rank_0000.log").read_text().splitlines()
    assert [message_of(line).split("  ")[0] for line in logged] == [
        *(f"step {step}/120" for step in range(0, 121, 20)),
        "a line [that] stays",
    ]


def test_the_summary_shows_steps_times_and_improvement() -> None:
    rows: list[dict[str, float | None]] = [
        {"step": 0, "time/step_total": 0.0, "time/val_step": 2.0, "val/score/mean": 0.46},
        {"step": 1, "time/step_total": 3.0, "critic/rewards/mean": 0.25},
        {"step": 2, "time/step_total": 1.0, "critic/rewards/mean": None},
        {"step": 3, "time/step_total": 2.0, "critic/rewards/mean": 0.5, "time/val_step": 1.0, "val/score/mean": 0.9},
    ]
    told = "steps in 6 s (2 s each)  evaluations 3 s  reward 0.250 -> 0.500  validation 0.460 -> 0.900"
    assert summary(rows, 3) == f"3 {told}"
    assert summary(rows, 10) == f"3 of 10 {told}", "a run that ended early says so"
    assert summary([], 10) == "0 of 10 steps"
    for row in (rows[0], rows[3]):
        row |= {"val/maths/score": row["val/score/mean"], "val/a/b/score": 0.5, "val/sampled/maths/score": 0.1}
    assert summary(rows, 3) == f"3 {told}\nvalidation by domain: a/b 0.500 -> 0.500, maths 0.460 -> 0.900"
    rows[0] |= {f"val/{n}/score": 0.5 for n in range(7)}
    assert summary(rows, 3) == f"3 {told}", "too many to show"
    assert summary([{"step": 1, "time/step_total": 26.0}], 1) == "1 step in 26 s (26 s each)"


@pytest.mark.parametrize("measured", [("reward", "validation"), ("reward",), ("validation",), ("loss",)])
def test_the_plot_shows_measured_metrics(tmp_path: Path, measured: tuple[str, ...]) -> None:
    names = {"reward": "critic/rewards/mean", "validation": "val/score/mean", "loss": "sft/loss"}
    rows = [{"step": step} | {names[what]: None if step == 2 else step / 10 for what in measured} for step in range(9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = plot(tmp_path)
    assert path == tmp_path / "plot.png"
    header = path.read_bytes()[:24]
    width, height = int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert (width, height) == (936, round(130 * (1.2 + 2.4 * len(measured)))), "one panel per measure"


def test_the_plot_shows_sampled_and_greedy_accuracy(tmp_path: Path) -> None:
    rows = [{"step": step, "val/score/mean": 0.5 + step / 10} for step in range(4)]
    pictures = []
    for extra in ({}, {"val/sampled/score/mean": 0.3}):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row | extra) + "\n" for row in rows))
        pictures += [plot(tmp_path).read_bytes(), plot(tmp_path).read_bytes()]
    assert pictures[0] == pictures[1] != pictures[2] == pictures[3]


def test_a_plot_without_metrics_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "actor/lr": 1}\n')
    with pytest.raises(ValueError, match="has no metrics to plot"):
        plot(tmp_path)


def test_the_plot_command_draws_or_names_runs_without_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "critic/rewards/mean": 0.5}\n')
    assert plot_command([str(tmp_path)]) == ExitCode.DONE
    assert capsys.readouterr().out.strip() == str(tmp_path / "plot.png")
    (tmp_path / "metrics.jsonl").unlink()
    assert plot_command([str(tmp_path)]) == ExitCode.BAD_INPUT
    assert "no metrics to plot" in capsys.readouterr().err
    assert plot_command([str(tmp_path / "nowhere")]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err == f"hpcrl: {tmp_path}/nowhere: no such folder\n"


def test_a_log_on_a_full_disk_can_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends with the error of writing the row."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    monkeypatch.setattr("hpcrl.metrics.log.read_metrics", lambda _: [])
    log = MetricsLog(tmp_path, -1, 10)
    with pytest.raises(OSError, match=r"No space left.*metrics\.jsonl"):
        log.log(0, {"x": 1.0})
    assert log.close() == []


def test_metrics_of_earlier_versions_get_their_new_names(tmp_path: Path) -> None:
    old = {
        "scheduler/stale": "scheduler/late_events",
        "time/step_model_update": "time/step_update_weights",
        "maths/score": "domain/maths/score",
        "openai/gsm8k/token/prompt_length/mean": "domain/openai/gsm8k/token/prompt_length/mean",
    }
    kept = [
        "system/critic/peak_gib",
        "critic/score/mean",
        "val/maths/score",
        "env/maths/score",
        "domain/maths/critic/kl",
    ]
    row = {"step": 1} | dict.fromkeys([*old, *kept], 0.5)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (read,) = read_metrics(tmp_path)
    assert [*read] == ["step", *old.values(), *kept] and json.loads((tmp_path / "metrics.jsonl").read_text()) == row
