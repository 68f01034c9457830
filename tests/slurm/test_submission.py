"""From the command line into real jobs: placement of ranks, refusals by Slurm, owners of a folder, and secrets."""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.launch.frozen import SUBMITTED_CONFIG
from hpcrl.node.preflight import read_reports
from hpcrl.run_folder import submitted_jobs, world_folder
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import committed_step, step_name
from tests.conftest import ROOT
from tests.slurm.jobs import (
    COMPLETED,
    ENDED,
    PENDING,
    RUNNING,
    Run,
    digest,
    launch,
    processes,
    ranks,
    show,
    step_of,
    submit,
    wait_state,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SPREAD = "layout=disaggregated layout.trainer.num_ranks=1 layout.generator.num_ranks=2 layout.reward.num_ranks=1"
COMPONENTS = """cluster.components={train: {roles: [controller, trainer]},
gen: {roles: [generator], ranks_per_node: 1}, cpu: {roles: [reward]}}""".replace("\n", " ")


@pytest.fixture
def idle(cluster: Any) -> Iterator[Any]:
    """The cluster with no job, and afterwards again."""
    yield cluster
    cluster.run("scancel", "--state=PENDING", "--user", str(os.getuid()), check=False)
    cluster.run("scancel", "--user", str(os.getuid()), check=False)
    wait_until(lambda: not cluster.run("squeue", "-h").strip(), lambda: cluster.run("squeue"))


def places(run: Run) -> dict[int, str]:
    """Rank -> the node of its process by Slurm; the preflight must have reported the same."""
    there = {rank: process.environ()["SLURMD_NODENAME"] for rank, process in ranks(run.cluster, run.job).items()}
    told = {rank: report.name for report in read_reports(world_folder(run.dir, 1)) for rank in report.ranks}
    assert there == told
    return there


def test_a_plain_job_runs_over_two_nodes(idle: Any, tmp_path: Path, tiny: list[str]) -> None:
    words = [*tiny, "max_steps=4", "layout=colocated"]
    run = Run(idle, tmp_path, *words, "cluster.components={all: {roles: [trainer, controller], ranks_per_node: 1}}")
    run.wait_step(1)
    assert places(run) == {0: "n1", 1: "n1", 2: "n2"}
    assert "HetJobId" not in show(idle, run.job) and show(idle, run.job)["NodeList"] == "n[1-2]"
    run.wait_end()
    assert step_of(run.dir) == 4 and digest(run.dir)


def test_each_of_three_components_runs_its_roles(idle: Any, tmp_path: Path, tiny: list[str]) -> None:
    run = Run(idle, tmp_path, *tiny, "max_steps=4", *SPREAD.split(), COMPONENTS)
    run.wait_step(1)
    where = places(run)
    parts = idle.run("scontrol", "--oneliner", "show", "job", str(run.job)).splitlines()
    nodes = [re.findall(r" NodeList=(\S+)", part)[0] for part in parts if part]
    assert len(nodes) == 3 and nodes[0] == where[0] == where[1] and nodes[2] == where[4]
    assert len({where[0], where[2], where[3], where[4]}) == 4, "two generator nodes, and no node of two components"
    run.wait_end()
    assert step_of(run.dir) == 4 and digest(run.dir)


@pytest.fixture(scope="module")
def closed(cluster: Any) -> Any:
    """The cluster with a restricted partition: one account, one node, ten minutes."""
    line = "PartitionName=closed Nodes=n[1-4] AllowAccounts=physics AllowQos=physics State=UP\n"
    line += "PartitionName=small Nodes=n[1-4] MaxNodes=1 MaxTime=10 State=UP\n"
    with cluster.conf.open("a") as conf:
        conf.write(line)
    cluster.run("scontrol", "reconfigure")
    return cluster


TWO_COMPONENTS = """layout=colocated layout.trainer.num_ranks=1 layout.reward={num_ranks:1,colocate_with:null}
cluster.components={train:{roles:[controller,trainer],ranks_per_node:1},cpu:{roles:[reward]}}"""
FOUR = "layout.trainer.num_ranks=4 cluster.components={all:{roles:[trainer,controller],ranks_per_node:1}}"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("cluster.partition=nowhere", "invalid partition specified: nowhere"),
        ("cluster.partition=closed cluster.account=chemistry", "Invalid account or account/partition combination"),
        ("cluster.partition=small", "Requested time limit is invalid"),
        (f"layout=colocated {FOUR} cluster.partition=small cluster.time=00:08:00", "Node count specification invalid"),
        (f"layout=colocated {FOUR.replace('=4', '=9')}", "More processors requested than permitted"),
        ("cluster.components={all:{roles:[trainer,controller],memory:900G}}", "Memory"),
        ("cluster.components={all:{roles:[trainer,controller],gpus_per_node:9}}", "node configuration"),
        ("cluster.constraint=purple", "Invalid feature specification"),
        ("cluster.reservation=mine", "reservation"),
        ("cluster.exclude=elsewhere", "Invalid node name specified"),
        ("cluster.time=soon", "cluster.time"),
        ("run_name=a;b", "run_name"),
        ("run_dir=/tmp/hpcrl%j", "run folder '/tmp/hpcrl%j': a batch script takes letters"),
        ("run_dir='/tmp/hpcrl,2'", "run folder '/tmp/hpcrl,2': a batch script takes letters"),
        ("cluster.prologue=fi", "cluster.prologue: bash: line 1: syntax error near unexpected token"),
        (
            "cluster.components={all:{roles:[trainer,controller]},spare:{roles:[env]}}",
            "cluster.components.spare.roles: no rank of this run has the role env; remove the component",
        ),
        ("run_dir=/proc/hpcrl", "run folder /proc/hpcrl cannot be written"),
        ("data.system_prompt='\udcff'", "the command line is not UTF-8"),
    ],
)
def test_a_refused_job_is_one_line(closed: Any, tmp_path: Path, tiny: list[str], words: str, reason: str) -> None:
    run = tmp_path / "run"
    done = launch(closed, run, *tiny, "max_steps=1", *words.split())
    assert done.returncode == ExitCode.BAD_INPUT, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1 and reason in done.stderr
    assert not closed.run("squeue", "-h").strip()
    left = {str(path.relative_to(run)) for path in run.rglob("*")} if run.exists() else set()
    left -= {"slurm/submissions", "slurm/submissions/0001"}
    assert left <= {"slurm", "slurm/job.sbatch", SUBMITTED_CONFIG}, "what Slurm refused is all there is"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", r"^slurm   accepts the job: Job \d+ to start at 20\d\d-\d\d-\d\d \d\d:\d\d using .* on nodes n1"),
        ("cluster.partition=nowhere", "^slurm   note: it would refuse the job: .*nvalid partition"),
        ("cluster.constraint=purple", "^slurm   note: it would refuse the job: Invalid feature specification$"),
        (TWO_COMPONENTS, "^slurm   accepts the job: "),
    ],
)
def test_a_dry_run_lets_slurm_check_a_job(closed: Any, tmp_path: Path, tiny: list[str], words: str, told: str) -> None:
    done = launch(closed, tmp_path / "run", *tiny, "max_steps=1", "dry_run=true", *words.split())
    assert done.returncode == ExitCode.DONE and re.search(told, done.stdout, re.M), done.stdout + done.stderr
    assert not closed.run("squeue", "-h").strip() and not (tmp_path / "run").exists()


def test_a_refused_submission_does_not_change_a_stopped_run(closed: Any, tmp_path: Path, tiny: list[str]) -> None:
    run = tmp_path / "run"
    wait_state(closed, run, submit(closed, run, *tiny, "max_steps=2"), [COMPLETED])

    def content() -> dict[Path, bytes]:
        scripts = {run / "slurm" / "job.sbatch", run / SUBMITTED_CONFIG}
        of_submission = {*scripts, *(run / "slurm" / "submissions").iterdir()}
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path not in of_submission}

    before = content()
    done = launch(closed, run, *tiny, "max_steps=4", "cluster.partition=nowhere")
    assert done.returncode == ExitCode.BAD_INPUT and "nowhere" in done.stderr
    assert content() == before


def test_a_run_with_an_owner_is_refused(idle: Any, tmp_path: Path, tiny: list[str]) -> None:
    """While pending, running and finished, for the same launch."""
    others = idle.run("sbatch", "--parsable", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 60")
    wait_until(lambda: "R" in idle.run("squeue", "-h", "-o", "%t"), lambda: idle.run("squeue"))
    run = Run(idle, tmp_path, *tiny, "max_steps=50", "save_every=0", pace=0.2)
    for state, word in ((PENDING, "pending"), (RUNNING, "running")):
        wait_state(idle, run.dir, run.job, [state])
        done = launch(idle, run.dir, *run.words)
        assert done.returncode == ExitCode.BAD_INPUT and len(done.stderr.splitlines()) == 1, done.stderr
        assert f"job {run.job}" in done.stderr and word in done.stderr and f"scancel {run.job}" in done.stderr
        idle.run("scancel", others.strip(), check=False)
    assert idle.run("squeue", "-h", "-o", "%i").split() == [str(run.job)]
    run.tell(pace=0)
    run.wait_end()
    done = launch(idle, run.dir, *run.words)
    assert done.returncode == 0 and "finished" in done.stdout and "is submitted" not in done.stdout
    assert not idle.run("squeue", "-h").strip()


def test_a_job_can_be_submitted_from_inside_a_job(idle: Any, tmp_path: Path, tiny: list[str]) -> None:
    """Neither that job's variables nor options in the environment, which would override the script's, reach the new
    job."""
    run = tmp_path / "run"
    words = [*tiny, "max_steps=1", "cluster.components={all: {roles: [trainer, controller], memory: 1G}}"]
    outer = {"SBATCH_WAIT": "1", "SBATCH_ARRAY_INX": "0-2", "SBATCH_TIMELIMIT": "7", "SBATCH_NO_REQUEUE": "1"}
    command = [sys.executable, "-m", "hpcrl.launch", "+cluster=slurm", f"run_dir={run}", *words]
    done = subprocess.run(
        ["salloc", "--quiet", "--mem-per-cpu=100", *command],
        env={**idle.environ, **outer, "HPCRL_RANK": "7", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    job = int(re.findall(r"job (\d+) is submitted", done.stdout)[0])
    told = show(idle, job)
    assert (told["TimeLimit"], told["Requeue"], "ArrayJobId" in told) == ("00:30:00", "1", False)
    wait_state(idle, run, job, [COMPLETED])
    assert step_of(run) == 1


def test_an_interrupted_submission_leaves_no_job(idle: Any, tmp_path: Path, tiny: list[str]) -> None:
    run = tmp_path / "run"
    words = [f"run_dir={run}", *tiny, "max_steps=1", "cluster.after=chain", "cluster.num_links=100"]
    slow = tmp_path / "bin" / "sbatch"  # a fast one has all links submitted before the signal comes
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\nsleep 0.2\nexec {shutil.which("sbatch", path=idle.environ["PATH"])} "$@"\n')
    slow.chmod(0o755)
    path = f"{slow.parent}:{idle.environ['PATH']}"
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcrl.launch", "+cluster=slurm", *words],
        env={**idle.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_until(lambda: len(submitted_jobs(run)) > 2, lambda: "not three links")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    assert process.wait(60) == ExitCode.INTERRUPTED
    assert len(submitted_jobs(run)) < 100, "it came in between"
    wait_until(lambda: not idle.run("squeue", "-h").strip(), lambda: idle.run("squeue"), timeout_s=20)


@pytest.mark.soak
def test_a_truncated_script_does_no_harm(idle: Any, tmp_path: Path, tiny: list[str]) -> None:
    """Cut at every stage, as a full disk would: the job ends, starts no rank, and the run resumes as if it had not
    existed."""
    run = Run(idle, tmp_path, *tiny, "save_every=100", "max_steps=6")
    run.wait_step(2)
    idle.run("scancel", str(run.job))
    said = run.wait_end("CANCELLED")
    saved, trained = committed_step(run.dir), step_of(run.dir)
    assert saved >= 2, said
    whole = (run.dir / "slurm" / "job.sbatch").read_text()
    for number, mark in enumerate(("--config", "begun=", "give_up()", "--ntasks-per-node=1 \\", "-m hpcrl.run")):
        cut = tmp_path / f"cut{number}.sbatch"
        cut.write_text(whole[: whole.index(mark)])
        job = int(idle.run("sbatch", "--parsable", f"--output={run.dir}/slurm/job-%j.log", str(cut)))
        wait_until(lambda job=job: show(idle, job)["JobState"] in ENDED, lambda: run.log)
        assert not processes(idle, job) and show(idle, job)["Restarts"] == "0"
    assert (committed_step(run.dir), step_of(run.dir)) == (saved, trained)
    assert "attempt 4 in job" in run.log, "three of the five had opened the run"
    again = Run(idle, tmp_path, *run.words, pace=0)
    assert f"resumed from {step_name(saved)}" in again.wait_end() and step_of(run.dir) == 6


def test_two_jobs_share_a_node(idle: Any, tmp_path: Path, tiny: list[str]) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    runs = [
        Run(idle, folder, *tiny, "max_steps=1000", "save_every=0", "cluster.exclude='n[2-4]'") for folder in folders
    ]
    for run in runs:
        run.wait_step(3)
    assert [(show(idle, run.job)["JobState"], show(idle, run.job)["NodeList"]) for run in runs] == [(RUNNING, "n1")] * 2


def test_the_control_key_is_shown_nowhere(idle: Any, tmp_path: Path, tiny: list[str]) -> None:
    run = Run(idle, tmp_path, *tiny, "max_steps=1000", "save_every=0", *SPREAD.split(), COMPONENTS)
    run.wait_step(1)
    (path,) = world_folder(run.dir, 1).glob("key_*")
    assert path.stat().st_mode & 0o777 == 0o600
    raw = path.read_bytes()
    forms = [raw.hex(), base64.b64encode(raw).decode(), raw.decode("latin-1")]
    shown = [idle.run("scontrol", "show", "job", str(run.job), "--details")]
    idle.run("scontrol", "write", "batch_script", str(run.job), str(tmp_path / "stored.sh"))
    shown += [(tmp_path / "stored.sh").read_text(), (run.dir / "slurm" / "job.sbatch").read_text(), run.log]
    shown += [path.read_text(errors="replace") for path in (run.dir / "logs").rglob("*.log")]
    started = processes(idle, run.job)
    assert len(started) >= 5 + 4, "five ranks and four agents"
    for process, environ in started.items():
        shown += [" ".join(process.cmdline()), " ".join(f"{name}={value}" for name, value in environ.items())]
    assert not [text for text in shown for form in forms if form in text]
    assert str(run.dir) in " ".join(shown), "this search finds what is there"


def test_nothing_is_written_outside_the_run_folder(idle: Any, tmp_path: Path, tiny: list[str]) -> None:
    """The working directory and the home of both the command and the job stay empty."""
    run, home, work = tmp_path / "run", tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    hidden = ("HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR")
    environ = {name: value for name, value in idle.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, "-m", "hpcrl.launch", "+cluster=slurm", f"run_dir={run}", *tiny, "max_steps=2"],
        env=environ | {"HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=work,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wait_state(idle, run, int(re.findall(r"job (\d+) is submitted", done.stdout)[0]), [COMPLETED])
    assert (run / "plot.png").exists(), "the run went to its end"
    assert [str(path) for folder in (home, work) for path in folder.rglob("*")] == []


# Root may write everywhere; without this capability it is an ordinary user.
AS_A_USER = ["setpriv", "--bounding-set=-dac_override"] if os.getuid() == 0 else []


def test_a_run_folder_of_another_user_is_refused(cluster: Any, tmp_path: Path) -> None:
    """A run folder that may be read but not written."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("run_name: theirs\n")
    run.chmod(0o555)
    command = [*AS_A_USER, sys.executable, "-m", "hpcrl.launch", "+cluster=slurm", "+experiment=demo", f"run_dir={run}"]
    environ = {**cluster.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.BAD_INPUT, done.stderr
    assert len(done.stderr.splitlines()) == 1 and f"{run} cannot be written: no permission in {run}" in done.stderr
    assert [path.name for path in run.iterdir()] == ["config.yaml"] and not cluster.run("squeue", "-h").strip()
