"""The scripts of launch/, which users adapt: each does what it says on a real Slurm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def script(cluster: Any, tmp_path: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**cluster.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "launch" / f"{name}.py"), *words]
    return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "launch").glob("*.py")))
def test_every_script_explains_itself(cluster: Any, tmp_path: Path, name: str) -> None:
    done = script(cluster, tmp_path, name, "--help")
    assert done.returncode == 0 and f"{sys.executable} {ROOT / 'launch' / name}.py" in done.stdout
    assert "KEY=VALUE" in done.stdout and not list(tmp_path.iterdir())


def test_one_run(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    done = script(cluster, tmp_path, "rlvr", "+experiment=demo", *tiny, "max_steps=1", "run_name=one")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("step 1: ")
    assert (tmp_path / "runs" / "one" / "hf" / "config.json").exists()
    bad = script(cluster, tmp_path, "rlvr", "+experiment=demo", *tiny, "trainer.lr=-1")
    assert bad.returncode != 0 and "trainer.lr" in bad.stderr.splitlines()[-1]


def test_learning_rates_times_seeds(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    words = ["+experiment=demo", *(word for word in tiny if not word.startswith("trainer.lr=")), "max_steps=1"]
    done = script(cluster, tmp_path, "sweep", *words, "--lr", "1e-3", "5e-3", "--seed", "0")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["lr0.001_seed0", "lr0.005_seed0"]
    assert done.stdout.splitlines()[-1].startswith("best lr 0.00")


def test_two_stages_and_again(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    train = [*(word for word in tiny if not word.startswith("model.path=")), "max_steps=1"]
    words = [*train, "--warm-up", "layout=single", "max_steps=1"]
    done = script(cluster, tmp_path, "two_stages", *words)
    assert done.returncode == 0, done.stderr
    first = [line.split()[2] for line in done.stdout.splitlines()[:2]]
    again = script(cluster, tmp_path, "two_stages", *words)  # both are finished
    assert [line.split()[2] for line in again.stdout.splitlines()[:2]] == first, again.stderr
    assert all("completed" in line for line in again.stdout.splitlines()[:2])
