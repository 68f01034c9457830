"""Sweeps: python -m hpcrl.launch -m."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import ConfigError
from hpcrl.launch.__main__ import main
from hpcrl.launch.sweep import expand
from hpcrl.metrics.log import read_metrics
from hpcrl.run_folder import stored_config
from hpcrl.system.exit_codes import ExitCode
from tests import in_process
from tests.conftest import ROOT
from tests.slurm.jobs import digest

FOUR = ("trainer.lr=1e-3,5e-3", "seed=0,1")


def sweep(environ: dict[str, str], run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpcrl.launch", "-m", f"run_dir={run_dir}", *words]
    environ = {**environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)


def test_points_of_a_sweep_have_their_own_names_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    points = expand(["+experiment=demo", "trainer.lr=1e-4,5e-4", "+cluster=slurm", "seed=range(0,2)"])
    names = [f"seed-{seed}_trainer.lr-{lr}" for lr in ("0.0001", "0.0005") for seed in (0, 1)]
    assert [point.name for point in points] == names
    common = ["+experiment=demo", "trainer.lr=0.0005", "+cluster=slurm", "seed=1"]
    assert points[3].arguments == [*common, f"run_name=demo_{names[3]}", f"run_dir=runs/demo/{names[3]}"]
    assert [point.name for point in expand(["algorithm=grpo,reinforce"])] == ["algorithm-grpo", "algorithm-reinforce"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["seed=1"], "no key has several values"),
        (["seed=0,0"], "two runs of the sweep would have the same name"),
        (["trainer.lr=interval(0,1)"], "an interval has no list of values"),
        (["run_name=" + ",".join(f"{c * 300}" for c in "ab")], "a folder's name would have 309 characters"),
    ],
)
def test_an_invalid_sweep_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        expand(words)


@pytest.mark.slow
def test_nothing_starts_if_one_point_is_invalid(tmp_path: Path, tiny: list[str]) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "SLURM_CONF"}
    words = ["-m", f"run_dir={tmp_path}/s", "+cluster=slurm", *tiny, "max_steps=2", "trainer.lr=1e-3,-1", "seed=0,x"]
    done = in_process.run(main, *words, at=tmp_path, environ=environ)
    assert (done.returncode, done.stdout) == (ExitCode.BAD_INPUT, "")
    assert len(done.stderr.splitlines()) == 2 and "override 'trainer.lr=-1'" in done.stderr
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_four_runs_on_slurm_have_separate_folders(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    words = ["+cluster=slurm", *tiny, *FOUR, "max_steps=2"]
    done = sweep(cluster.environ, tmp_path / "s", *words)
    assert done.returncode == ExitCode.DONE, done.stdout + done.stderr
    folders = sorted((tmp_path / "s").iterdir())
    assert [f.name for f in folders] == [f"seed-{seed}_trainer.lr-{lr}" for seed in (0, 1) for lr in (0.001, 0.005)]
    jobs = set()
    for folder in folders:
        config = stored_config(folder)
        assert folder.name == f"seed-{config.seed}_trainer.lr-{config.trainer.lr}"
        assert read_metrics(folder)[-1]["step"] == 2
        jobs |= set(json.loads((folder / "slurm" / "submitted.json").read_text())["jobs"])
    assert len(jobs) == 4 and len({digest(folder) for folder in folders}) == 4
    table = done.stdout.splitlines()[-4:]
    assert all("completed" in line and "step 2" in line for line in table)

    again = sweep(cluster.environ, tmp_path / "s", *words)  # nothing is left to do
    assert again.returncode == ExitCode.DONE and again.stdout.splitlines()[-4:] == table
    single = sweep(cluster.environ, folders[0], *words)
    assert single.returncode == ExitCode.BAD_INPUT and f"{folders[0]} is a single run" in single.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_other_runs_finish_if_one_fails(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    bad = tmp_path / "impossible.jsonl"
    bad.write_text("".join(json.dumps({"prompt": f"digit {i}", "answer": "no digit"}) + "\n" for i in range(8)))
    good = next(word.split("=", 1)[1] for word in tiny if word.startswith("data.train="))
    others = [word for word in tiny if not word.startswith("data.train=")]
    words = [*others, f"data.train={bad},{good}", "rollout.filter_std=true", "max_steps=1"]
    done = sweep(cluster.environ, tmp_path / "s", "+cluster=slurm", *words)
    assert done.returncode == ExitCode.FAILED
    failed, completed = done.stdout.splitlines()[-2:]
    assert "failed" in failed and "completed" in completed and "starved: " in done.stderr


@pytest.mark.slow
def test_runs_of_a_local_sweep_run_one_after_another(tmp_path: Path, tiny: list[str]) -> None:
    words = [word for word in tiny if not word.startswith("cluster.")]
    done = sweep(dict(os.environ), tmp_path / "s", *words, "max_steps=1", "seed=0,1")
    assert done.returncode == ExitCode.DONE, done.stderr
    assert [line.split() for line in done.stdout.splitlines()[-2:]] == [
        [f"seed-{seed}", "done", "step", "1", *line.split()[4:]]
        for seed, line in zip((0, 1), done.stdout.splitlines()[-2:], strict=True)
    ]


@pytest.mark.slow
def test_submission_imports_no_torch() -> None:
    modules = "hpcrl.launch.executor, hpcrl.launch.sweep, hpcrl.launch.sweep_launcher"
    command = [sys.executable, "-c", f"import sys, {modules}; print('torch' in sys.modules)"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "False\n", done.stderr
