"""Evaluation alone as whole runs: it gives a validation's results, and a kill changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.launch.evaluation import main
from hpcrl.metrics.log import read_metrics
from hpcrl.metrics.responses import partial_file, read_responses, responses_file
from hpcrl.system.exit_codes import ExitCode
from tests import in_process
from tests.e2e.program import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = ["layout=single", "rollout.max_new_tokens=3", "data.max_prompt_tokens=32", "cluster.device=cpu"]
RESULTS = ("evaluation.json", "evaluation.html", "validation/step_000000.jsonl")


def evaluate(at: Path, *words: str) -> str:
    """What `hpcrl eval` prints in this folder."""
    command = [sys.executable, "-m", "hpcrl", "eval", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=at, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == ExitCode.DONE, done.stdout + done.stderr
    return done.stdout


def start_and_kill(at: Path, happened: Callable[[], bool], *words: str) -> None:
    """SIGKILL to `hpcrl eval` when it happened."""
    command = [sys.executable, "-m", "hpcrl", "eval", *words]
    environ, deadline = {**os.environ, "OMP_NUM_THREADS": "1"}, time.monotonic() + 100
    with subprocess.Popen(command, cwd=at, env=environ, stdout=subprocess.DEVNULL) as process:
        while not happened() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL and happened()


def test_a_run_evaluated_alone_has_the_results_of_its_last_validation(
    tmp_path: Path, digit_model: Path, digit_data: Path
) -> None:
    """Its final model and earlier checkpoints, one by --step N, one by --follow, which is killed once and evaluates
    nothing that is evaluated; a second start shows the results again and generates nothing."""
    words = [f"model.path={digit_model}", f"data.train={digit_data}", f"data.val={digit_data}", "pipeline=sft", *SMALL]
    (tmp_path / "runs").mkdir()
    words += ["max_steps=3", "save_every=1", "keep_checkpoints=3", "eval_every=1", "sft.batch_size=16"]
    words += ["trainer.lr=3e-3"]
    start = Start(tmp_path / "runs" / "warm", [*words, "eval.num_prompts=40", "reward.default.name=exact_match"])
    assert start.wait() == ExitCode.DONE, start.text
    rows = {row["step"]: row for row in read_metrics(tmp_path / "runs" / "warm")}
    for step, further in ((3, []), (2, ["--follow"]), (1, ["--step", "1"])):
        folder = tmp_path / "runs" / f"warm_eval_step_{step:06d}"
        if step == 2:
            start_and_kill(tmp_path, (folder / "owners" / "0001").exists, "warm", "--follow", "--every=2")
            assert not (folder / "evaluation.json").exists()
            further.append("--every=2")
        said = evaluate(tmp_path, "warm", *further)
        told = json.loads((folder / "evaluation.json").read_bytes())
        logged = {
            name: value for name, value in rows[step].items() if name.startswith("val/") and "sampled" not in name
        }
        assert told["metrics"] == logged and 0 < logged["val/score/mean"] < 1
        (_, alone), (head, inside) = (
            read_responses(responses_file(run, at)) for run, at in ((folder, 0), (tmp_path / "runs" / "warm", step))
        )
        assert alone == inside and len(alone) == 40 and head["sets"]["default"]["path"] == str(digit_data)
        assert f"{logged['val/score/mean']:.3f} ± " in said
        if step == 2:
            scores = [f"{rows[at]['val/score/mean']:.3f}" for at in (2, 3)]
            shown = said[said.index("\nstep  default\n") :].splitlines()
            assert [line.split()[:2] for line in shown[2:4]] == [["2", scores[0]], ["3", scores[1]]]
            assert f"best step {2 if scores[0] >= scores[1] else 3}: val/score/mean" in shown[4]
    before = {name: (folder / name).stat().st_mtime_ns for name in RESULTS}
    said = in_process.run(main, "warm", "--step", "1", at=tmp_path).stdout
    assert "finished: evaluated 40 responses to 40 prompts" in said and f"{logged['val/score/mean']:.3f} ± " in said
    assert {name: (folder / name).stat().st_mtime_ns for name in RESULTS} == before


def test_a_killed_evaluation_ends_with_the_same_files(tmp_path: Path, digit_model: Path, digit_data: Path) -> None:
    """SIGKILL, with a torn last line, and Slurm's signal; 16 parts of 4 prompts, in environments of two turns."""
    words = ["pipeline=evaluate", f"model.path={digit_model}", f"data.val={digit_data}", *SMALL]
    words += ["generator.max_num_seqs=1", "env.default.name=scripted", "env.default.add_reward=true"]
    words += ["reward.default.name=exact_match"]
    for name in "ab":
        (tmp_path / name).mkdir()
    whole = Start(tmp_path / "a" / "run", words)
    assert whole.wait() == ExitCode.DONE, whole.text
    run = tmp_path / "b" / "run"
    partial = partial_file(run)

    def stored() -> int:
        return partial.read_bytes().count(b"\n") - 1 if partial.exists() else 0

    start = Start(run, words)
    start.wait_until(lambda: stored() >= 8)
    start.kill()
    kept = stored()
    assert 8 <= kept < 64, start.text
    lines = partial.read_bytes().splitlines(keepends=True)
    partial.write_bytes(b"".join(lines[:-1]) + lines[-1][:-9])
    start = Start(run, words)
    start.wait_until(lambda: stored() >= kept + 4)
    assert f"{kept - 1} of 64 prompts have their responses from an earlier attempt" in start.text
    start.process.send_signal(signal.SIGUSR1)
    assert start.wait() == ExitCode.REQUEUE and "stopped by SIGUSR1" in start.text, start.text
    assert not (run / "evaluation.json").exists() and 64 > stored() >= kept + 3
    last = Start(run, words)
    assert last.wait() == ExitCode.DONE, last.text
    for name in RESULTS:
        assert (run / name).read_bytes() == (tmp_path / "a" / "run" / name).read_bytes(), name
    assert not partial.exists()
    _, rows = read_responses(responses_file(run, 0))
    assert [row["row"] for row in rows] == list(range(64)), "in order of the data"
    for row in rows:
        assert [message["role"] for message in row["prompt"]] == ["user"]
        assert [message["role"] for message in row["response"]] == ["assistant", "user", "assistant"]
