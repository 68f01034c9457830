"""Runs from scripts and from the notebook: train, read back, call again, interrupt, lose the caller."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import hpcrl
from tests.conftest import ROOT
from tests.e2e.program import MARK

pytestmark = pytest.mark.slow

SETTINGS = """\
import hpcrl
from my_parts import score

KEYS = dict(
    experiment="demo", layout="single", run_name="mine", max_steps=2, eval_every=0, reward=score,
    rollout={"num_prompts": 4, "group_size": 4, "max_new_tokens": 8, "filter_std": False},
    algorithm={"num_mini_batches": 1},
)
"""
PARTS = """\
def score(completions, **columns):
    return [len(text) / 10 for text in completions]
"""
TRAIN = """\
import sys
from settings import *

if __name__ == "__main__":
    print(repr(hpcrl.train(*sys.argv[1:], **KEYS)))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in {"settings.py": SETTINGS, "my_parts.py": PARTS, "train.py": TRAIN}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield tmp_path
    monkeypatch.delenv(MARK)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                process.kill()


def python(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.timeout(300)
def test_a_script_trains_with_its_reward_reads_it_back_evaluates_and_returns_at_once_again(place: Path) -> None:
    done = python(place, "train.py")
    assert done.returncode == 0, done.stderr
    assert "step 2/2  reward" in done.stdout and done.stdout.endswith(f"hpcrl.Run('{place}/runs/mine')\n")
    run = hpcrl.Run(place / "runs" / "mine")
    assert run.state == "finished" and run.step == 2 and run.config["reward"]["default"]["name"] == "function"
    samples = [*run.samples()]
    assert len(samples) == 2 * 16 and {sample.step for sample in samples} == {1, 2}
    assert all(sample.reward == pytest.approx(len(sample.response) / 10, abs=1e-6) for sample in samples)
    means = [np.mean([sample.reward for sample in run.samples(step)]) for step in (1, 2)]
    np.testing.assert_allclose(run.metrics["critic/rewards/mean"][1:], means, rtol=1e-5)
    assert [(each.step, each.valid) for each in run.checkpoints(verify=True)] == [(2, True)]
    again = python(place, "train.py")
    assert "finished: trained 2 steps" in again.stdout and again.returncode == 0, again.stderr
    assert len(list((run.path / "owners").iterdir())) == 1, "no second attempt"
    call = "hpcrl.evaluate(hpcrl.Run('mine'), 'eval.num_prompts=6', eval={'temperature': 0.5, 'num_prompts': 9})"
    done = python(place, "-c", f"import hpcrl\nprint(repr({call}))")
    beside = f"{run.path}_eval_step_000002"
    assert done.returncode == 0 and done.stdout.endswith(f"hpcrl.Run({beside!r})\n"), done.stderr
    evaluated = hpcrl.Run(beside)
    rows = evaluated.validation()
    assert len(rows) == 6 and all(row["score"] == pytest.approx(len(row["response"]) / 10) for row in rows)
    mean = np.mean([row["score"] for row in rows])
    assert evaluated.evaluation["metrics"]["val/score/mean"] == pytest.approx(mean)
    assert run.evaluation == {} and evaluated.state == "finished"


FAKE = ("debug=fake", "max_steps=100000", "save_every=1000", "rollout.save_rollouts=false", "fake.train_s=0.01")


def attempt(place: Path, number: int, after: int, signal_number: int) -> tuple[int, str]:
    """Call train.py until its run is past a step, and signal it; (exit code, what it printed) when the run stopped."""
    folder, printed = place / "runs" / "mine", place / "printed"
    with open(printed, "wb") as out:
        caller = subprocess.Popen([sys.executable, "train.py", *FAKE], cwd=place, stdout=out, stderr=out)
    deadline = time.monotonic() + 80
    while not (folder / "owners" / f"{number:04d}").exists() or hpcrl.Run(folder).step <= after:
        assert time.monotonic() < deadline and caller.poll() is None, printed.read_text()
        time.sleep(0.05)
    caller.send_signal(signal_number)
    code = caller.wait(60)
    while hpcrl.Run(folder).state != "stopped":
        assert time.monotonic() < deadline, hpcrl.Run(folder).status
        time.sleep(0.05)
    return code, printed.read_text()


@pytest.mark.timeout(300)
def test_an_interrupt_saves_and_the_loss_of_the_caller_too(place: Path) -> None:
    """In a run without a model; the second attempt resumes the checkpoint of the first."""
    run = place / "runs" / "mine"
    code, printed = attempt(place, 1, 0, signal.SIGINT)
    assert code == -signal.SIGINT and printed.splitlines()[-1] == "KeyboardInterrupt"
    (first,) = hpcrl.Run(run).checkpoints()
    assert first.valid and first.step == hpcrl.Run(run).step
    code, printed = attempt(place, 2, first.step + 1, signal.SIGKILL)
    assert code == -signal.SIGKILL and "attempt 2, resumes" in printed
    newest = hpcrl.Run(run).checkpoints()[-1]
    assert newest.valid and newest.step > first.step and newest.step == hpcrl.Run(run).step
    with pytest.raises(hpcrl.RunFailed, match=r"stopped: attempt 2 ended .*the same command resumes it") as error:
        hpcrl.Run(run).wait(poll_s=0.05)
    assert error.value.exit_code == 143


NOTEBOOK = ROOT / "docs" / "notebooks" / "first_run.ipynb"


def test_the_notebooks_cells_run_in_order(place: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    program = []
    for source in sources:
        if found := re.match(r"%%writefile (\S+)\n", source):
            program.append(f"open({found[1]!r}, 'w').write({source[found.end() :]!r})")
        else:
            program.append(f"exec(compile({source!r}, '<cell>', 'exec'))")
    (place / "cells.py").write_text("\n".join(program))
    done = python(place, "cells.py")
    assert done.returncode == 0, done.stderr
    rewards = hpcrl.Run(place / "runs" / "first_run").metrics["critic/rewards/mean"]
    assert rewards[-1] > 3 * rewards[1], "it learns"
    assert "step_000015 valid" in done.stdout and done.stdout.splitlines()[-1].startswith("sort: 9 8 -> [")
    assert all(not cell.get("outputs") for cell in cells), "outputs stay out of the repository"
