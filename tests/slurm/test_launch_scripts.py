"""The scripts in launch/, which users adapt: each works as documented on a real Slurm."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrl.envs.adapters.remote import RemoteEnv, RemoteEnvError
from hpcrl.envs.spec import RemoteOptions
from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def script(cluster: Any, tmp_path: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**cluster.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "launch" / f"{name}.py"), *words]
    return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "launch").glob("*.py")))
def test_every_launch_script_prints_its_help(cluster: Any, tmp_path: Path, name: str) -> None:
    done = script(cluster, tmp_path, name, "--help")
    assert done.returncode == 0 and f"{sys.executable} {ROOT / 'launch' / name}.py" in done.stdout
    assert "KEY=VALUE" in done.stdout and not list(tmp_path.iterdir())


def test_a_script_launches_one_run(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    done = script(cluster, tmp_path, "rlvr", "+experiment=demo", *tiny, "max_steps=1", "run_name=one")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("step 1: ")
    assert (tmp_path / "runs" / "one" / "hf" / "config.json").exists()
    bad = script(cluster, tmp_path, "rlvr", "+experiment=demo", *tiny, "trainer.lr=-1")
    assert bad.returncode != 0 and "trainer.lr" in bad.stderr.splitlines()[-1]


def test_a_script_sweeps_learning_rates_and_seeds(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    words = ["+experiment=demo", *(word for word in tiny if not word.startswith("trainer.lr=")), "max_steps=1"]
    done = script(cluster, tmp_path, "sweep", *words, "--lr", "1e-3", "5e-3", "--seed", "0")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["lr0.001_seed0", "lr0.005_seed0"]
    assert done.stdout.splitlines()[-1].startswith("best lr 0.00")


def test_a_script_runs_two_stages_and_can_be_repeated(cluster: Any, tmp_path: Path, tiny: list[str]) -> None:
    train = [*(word for word in tiny if not word.startswith("model.path=")), "max_steps=1"]
    words = [*train, "--warm-up", "layout=single", "max_steps=1"]
    done = script(cluster, tmp_path, "two_stages", *words)
    assert done.returncode == 0, done.stderr
    first = [line.split()[2] for line in done.stdout.splitlines()[:2]]
    again = script(cluster, tmp_path, "two_stages", *words)  # both are finished
    assert [line.split()[2] for line in again.stdout.splitlines()[:2]] == first, again.stderr
    assert all("completed" in line for line in again.stdout.splitlines()[:2])


def test_a_script_starts_an_environment_server_on_every_node(cluster: Any, tmp_path: Path) -> None:
    script = str(ROOT / "launch" / "env_servers.sbatch")
    options = ["--parsable", "--nodes=2", "--cpus-per-task=1", "--mem=0", "--time=10"]
    environ = {**cluster.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    submit = ["sbatch", *options, script, "env.numbers.name=guess", "env.numbers.options.high=9"]
    job = subprocess.run(submit, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True).stdout.strip()
    folder, deadline = tmp_path / "env_servers" / job, time.monotonic() + 200
    try:
        while len(nodes := list(folder.glob("n*"))) < 2:
            assert time.monotonic() < deadline, list(tmp_path.glob("**/*"))
            time.sleep(0.2)
        assert (folder / "token").stat().st_mode & 0o077 == 0
        for node in nodes:
            asyncio.run(episode(node.read_text().strip(), (folder / "token").read_text().strip()))
    finally:
        subprocess.run(["scancel", job], env=environ, check=True)


async def episode(url: str, token: str) -> None:
    """A turn of the environment, which is refused without the token."""
    env = RemoteEnv(RemoteOptions(url=url, section="numbers", token_env="HPCRL_ENV_TOKEN"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCRL_ENV_TOKEN", "another")
        with pytest.raises(RemoteEnvError, match="the token is wrong"):
            await env.reset(0)
        patch.setenv("HPCRL_ENV_TOKEN", token)
        text, _ = await env.reset(0)
        assert "Find the number" in text
        assert (await env.step("<answer>0</answer>"))[1] < 0
        await env.close()
