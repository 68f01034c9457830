"""An experiment's file edited while its job waits, and again while it runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrl.run_folder import stored_config
from tests.conftest import ROOT
from tests.slurm.jobs import Run, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def write(folder: Path, lr: str) -> None:
    file = folder / "conf" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"# @package _global_\n# Of one's own.\ntrainer: {{lr: {lr}}}\n")


def test_a_job_runs_as_submitted_before_and_after_its_requeue(
    cluster: Any, tmp_path: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "1e-3")
    words = ["+experiment=mine", *(word for word in tiny if not word.startswith("trainer.lr=")), "max_steps=12"]
    others = cluster.run("sbatch", "--parsable", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 300")
    wait_until(lambda: "R" in cluster.run("squeue", "-h", "-o", "%t"), lambda: cluster.run("squeue"))
    run = Run(cluster, tmp_path, *words)
    write(tmp_path, "9e-1")
    cluster.run("scancel", others.strip())
    run.wait_step(2)
    run.tell(pace=1)  # it must not end before
    write(tmp_path, "[fast")
    cluster.run("scancel", "--signal=USR1", str(run.job))
    run.wait_restart(1)
    run.tell(pace=0)
    said = run.wait_end()
    assert re.findall(r"attempt (\d) ended \((\w+)\)", said) == [("1", "requeue"), ("2", "done")]
    assert "changed" not in said and stored_config(run.dir).trainer.lr == 1e-3


def test_a_script_submitted_by_hand_keeps_the_configuration_of_its_first_start(
    cluster: Any, tmp_path: Path, tiny: list[str]
) -> None:
    write(tmp_path, "1e-3")
    run = tmp_path / "run"
    words = ["+cluster=slurm", "+experiment=mine", f"run_dir={run}", "max_steps=300"]
    words += [word for word in tiny if not word.startswith("trainer.lr=")]
    code = (
        "import sys; from hpcrl.cluster.layout import RoleLayout; from hpcrl.cluster.placement import Placement;"
        "from hpcrl.config import load; from hpcrl.launch.render import render; words = sys.argv[1:]; c = load(words);"
        "print(render(c, Placement.from_config(c, RoleLayout.from_config(c)), words, sys.executable), end='')"
    )
    environ = {**cluster.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    (tmp_path / "by_hand.sbatch").write_text(done.stdout)
    log = tmp_path / "log"
    submitted = subprocess.run(
        ["sbatch", "--parsable", f"--output={log}", "by_hand.sbatch"],
        cwd=tmp_path,
        env=environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    job = submitted.stdout.strip()
    wait_until(
        lambda: log.exists() and " INFO step " in log.read_text(), lambda: log.read_text() if log.exists() else ""
    )
    write(tmp_path, "9e-1")
    cluster.run("scancel", "--signal=USR1", job)
    wait_until(lambda: "attempt 1 ended (requeue)" in log.read_text(), log.read_text)
    cluster.run("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)
    said = "note: changed in files since this run began, and ignored: trainer.lr: 0.001 -> 0.9"
    wait_until(lambda: said in log.read_text(), log.read_text)
    wait_until(lambda: "resumed from step_" in log.read_text(), log.read_text)
    assert stored_config(run).trainer.lr == 1e-3
    cluster.run("scancel", job)
