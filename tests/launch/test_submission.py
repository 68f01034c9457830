"""Submission with fake sbatch and scontrol commands: one launch at a time, and precedence of variables."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hpcrl.cluster import slurm
from hpcrl.commands.status import main as status
from hpcrl.launch.__main__ import main
from hpcrl.launch.prepare import prepare
from hpcrl.launch.submission import CLAIMS, environment_notes
from hpcrl.run_folder import SUBMITTED, submitted_jobs
from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT

SBATCH = """\
#!/bin/bash
sleep {pause}
env >> {folder}/environ
until mkdir {folder}/lock 2>/dev/null; do sleep .01; done
number=$(($(cat {folder}/number 2>/dev/null || echo 8) + 1)); echo $number > {folder}/number
rmdir {folder}/lock
echo "$number{suffix}"
"""
SCONTROL = """\
#!/bin/bash
[ "$2" = config ] && {{ echo "ClusterName = here"; exit; }}
echo "JobId=${{!#}} JobState={state} Restarts=0 PreemptTime=None Reason=None EndTime=Unknown"
"""
WORDS = ("+cluster=slurm", "data.train=task:sort_digits", "reward.default.name=sort_digits", "run_dir=run")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose sbatch numbers jobs from 9 on, and whose scontrol reports all of them as pending."""
    make_slurm(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_slurm(folder: Path, pause: float = 0.0, suffix: str = "", state: str = "PENDING") -> None:
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL)):
        program = folder / "bin" / name
        program.write_text(text.format(folder=folder, pause=pause, suffix=suffix, state=state))
        program.chmod(0o755)


Launch = Callable[..., tuple[int, str, str]]


@pytest.fixture
def launch(site: Path, capsys: pytest.CaptureFixture[str]) -> Launch:
    """Runs hpcrl.launch with WORDS and further arguments; returns exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main([*WORDS, *words])
        return (code, *capsys.readouterr())

    return run


@pytest.mark.slow
def test_three_concurrent_launches_submit_one_job(site: Path, launch: Launch) -> None:
    make_slurm(site, pause=3.0)  # longer than the time between the launches
    command = [sys.executable, "-m", "hpcrl.launch", *WORDS]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]  # type: ignore[call-overload]
    found = [(process.returncode, *said) for process in processes if (said := process.communicate(timeout=60))]
    assert sorted(code for code, _, _ in found) == [ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.BAD_INPUT], found
    assert (site / "number").read_text() == "9\n" and submitted_jobs(site / "run") == [9]
    for code, _, error in found:
        if code:
            assert len(error.splitlines()) == 1
            assert "is submitting this run" in error or "belongs to job 9" in error
    code, _, error = launch()
    assert code == ExitCode.BAD_INPUT and "belongs to job 9, which is pending" in error


def claim(site: Path, **holder: object) -> Path:
    """A claim with number 4 as a killed launch leaves it."""
    path = site / "run" / CLAIMS / "0004"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(holder) if holder else "")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("written", [True, False])
def test_the_claim_of_a_killed_launch_is_taken_over(site: Path, written: bool, launch: Launch) -> None:
    process = psutil.Process()
    here = {"host": platform.node(), "pid": process.pid, "process_start": 0.0} if written else {}
    claim(site, **here)
    code, out, error = launch()
    assert code == ExitCode.DONE and "job 9 is submitted" in out, error
    (left,) = (site / "run" / CLAIMS).iterdir()
    assert left.name == "0005" and json.loads(left.read_text())["ended"]


@pytest.mark.parametrize(
    ("host", "told"), [("elsewhere", "if that process is gone, remove"), (platform.node(), "; repeat")]
)
def test_the_claim_of_a_possibly_living_launch_is_respected(site: Path, host: str, told: str, launch: Launch) -> None:
    process = psutil.Process()
    claim(site, host=host, pid=process.pid, process_start=process.create_time())
    code, _, error = launch()
    assert code == ExitCode.BAD_INPUT and len(error.splitlines()) == 1
    assert f"pid {process.pid} on host {host} is submitting this run" in error and told in error
    assert not (site / "number").exists()


def test_a_job_that_is_completing_needs_no_scancel(site: Path, launch: Launch) -> None:
    assert launch()[0] == ExitCode.DONE
    make_slurm(site, state="COMPLETING")
    code, _, error = launch()
    assert code == ExitCode.BAD_INPUT and "scancel" not in error
    assert "belongs to job 9, which is completing; it is about to end: wait a moment" in error


def test_the_cluster_of_a_federated_job_is_kept(site: Path, launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    make_slurm(site, suffix=";there")
    code, out, error = launch()
    assert code == ExitCode.DONE, error
    assert "  stop    scancel --clusters=there 9\n" in out
    assert json.loads((site / "run" / SUBMITTED).read_text())["cluster"] == "there"
    assert status(["run"]) == ExitCode.DONE
    assert "unknown: job 9: run this on cluster there, not on here" in capsys.readouterr().out


def test_shell_variables_are_named_and_the_runs_own_take_precedence(
    site: Path, monkeypatch: pytest.MonkeyPatch, launch: Launch
) -> None:
    given = {
        **{"SBATCH_PARTITION": "low", "SBATCH_GRES": "gpu:1", "SBATCH_MEM_PER_CPU": "1", "SBATCH_TIMELIMIT": "7"},
        **{"SBATCH_ACCOUNT": "mine", "SLURM_CPU_BIND": "none", "SRUN_CPUS_PER_TASK": "2", "SLURM_CONF": "/none"},
    }
    components = "cluster.components={a: {roles: [controller, trainer], gpus_per_node: 2, memory: 2G}}"
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    code, out, error = launch("cluster.partition=high", components)
    assert code == ExitCode.DONE, error
    left_out = {line.split("=")[0].split()[-1] for line in out.splitlines() if "is not passed on" in line}
    held = {line.split("=")[0].split()[-1] for line in out.splitlines() if "affects all nodes" in line}
    assert left_out == {"SBATCH_PARTITION", "SBATCH_GRES", "SBATCH_MEM_PER_CPU", "SBATCH_TIMELIMIT"}
    assert held == {"SBATCH_ACCOUNT", "SLURM_CPU_BIND", "SRUN_CPUS_PER_TASK"}
    seen = {line.partition("=")[0] for line in (site / "environ").read_text().splitlines()}
    assert not seen & left_out and held <= seen


def test_a_shell_without_relevant_variables_gives_no_notes(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if slurm.FOR_SRUN.fullmatch(name) or name.startswith("SBATCH_")]:
        monkeypatch.delenv(name)
    config, layout, *_ = prepare(WORDS)
    assert environment_notes(config, layout) == []


def test_executor_parameters_may_be_mappings(site: Path) -> None:
    pytest.importorskip("submitit")
    from hpcrl.launch.executor import HpcrlExecutor, run

    executor = HpcrlExecutor(site)
    options = {"exclusive": True, "mail-user": "me@site.org", "comment": "it's"}
    components = {"a": {"roles": ["controller", "trainer"], "memory": "3G"}}
    executor.update_parameters(sbatch_options=options, components=components, partition="low,high", time="60")
    job = executor.submit(run, *WORDS[1:3], "run_name=it")
    script = (job.run_dir / "slurm" / "job.sbatch").read_text()
    for option in ("--exclusive", "--mail-user=me@site.org", "--mem=3G", "--partition=low,high", "--time=60"):
        assert f"#SBATCH {option}\n" in script, script
