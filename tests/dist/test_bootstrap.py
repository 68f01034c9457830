"""Rank and node by each launcher's variables; how ranks find the store; real starts by torchrun and mpirun."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hpcrl.commands import stacks
from hpcrl.messaging.bootstrap import ENDPOINT, ProcessInfo, find_place, make_key_file, share_endpoint
from hpcrl.run_folder import hang_path, log_folder
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import backed_off_s

Environ = dict[str, str]


def torchrun(rank: int, size: int, node: int = 0, nodes: int = 1) -> Environ:
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "LOCAL_RANK": str(rank % max(1, size // nodes)),
    }


def openmpi(rank: int, size: int, local: int) -> Environ:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local),
        "PMIX_RANK": str(rank),
    }


def mpich(rank: int, size: int, local: int) -> Environ:
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALNRANKS": str(local), "MPI_LOCALRANKID": "0"}


def slurm(rank: int, tasks: int, node: int, nodes: int, job_tasks: int | None = None) -> Environ:
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(job_tasks or tasks),
        "SLURM_NNODES": str(nodes),
    }


def agent(rank: int, node: int = 0, nodes: int = 1) -> Environ:
    return {"HPCRL_RANK": str(rank), "HPCRL_NODE": str(node), "HPCRL_NUM_NODES": str(nodes)}


BATCH_SCRIPT = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}  # no step yet

PLACES = {
    "local": ({}, 3, ProcessInfo("agent", "local", 0, 0, 1)),
    "local, one rank": ({}, 1, ProcessInfo("agent", "local", 0, 0, 1)),
    "a batch script": (BATCH_SCRIPT, 8, ProcessInfo("agent", "local", 0, 0, 1)),
    "rank of an agent": (agent(2), 3, ProcessInfo("rank", "agent", 2, 0, 1)),
    "rank of an agent on node 3": (agent(9, 3, 4), 12, ProcessInfo("rank", "agent", 9, 3, 4)),
    "rank of an agent in Slurm": (slurm(3, 4, 3, 4) | agent(9, 3, 4), 12, ProcessInfo("rank", "agent", 9, 3, 4)),
    "torchrun": (torchrun(2, 3), 3, ProcessInfo("rank", "torchrun", 2, 0, 1)),
    "torchrun, 2 nodes": (torchrun(5, 8, 1, 2), 8, ProcessInfo("rank", "torchrun", 5, 1, 2)),
    "torchrun, one per node": (torchrun(1, 2, 1, 2), 8, ProcessInfo("agent", "torchrun", 1, 1, 2)),
    "torchrun, one rank": (torchrun(0, 1), 1, ProcessInfo("rank", "torchrun", 0, 0, 1)),
    "torchrun in a Slurm step": (slurm(1, 2, 1, 2) | torchrun(5, 8, 1, 2), 8, ProcessInfo("rank", "torchrun", 5, 1, 2)),
    "Open MPI": (openmpi(2, 3, 3), 3, ProcessInfo("rank", "mpi", 2, 0, 1)),
    "Open MPI, 2 nodes": (openmpi(5, 8, 4), 8, ProcessInfo("rank", "mpi", 5, 1, 2)),
    "Open MPI, uneven, few": (openmpi(0, 3, 2), 3, ProcessInfo("rank", "mpi", 0, 0, 2)),
    "Open MPI, uneven, last": (openmpi(2, 3, 1), 3, ProcessInfo("rank", "mpi", 2, 2, 3)),
    "Open MPI, one per node": (openmpi(1, 2, 1), 8, ProcessInfo("agent", "mpi", 1, 1, 2)),
    "Open MPI in a batch script": (BATCH_SCRIPT | openmpi(2, 3, 3), 3, ProcessInfo("rank", "mpi", 2, 0, 1)),
    "MPICH": (mpich(2, 3, 3), 3, ProcessInfo("rank", "mpi", 2, 0, 1)),
    "MPICH started by srun": (slurm(0, 2, 0, 2) | mpich(5, 8, 4), 8, ProcessInfo("rank", "mpi", 5, 1, 2)),
    "PMI without a node size": ({"PMI_RANK": "1", "PMI_SIZE": "3"}, 3, ProcessInfo("rank", "mpi", 1, 0, 1)),
    "Slurm, one per rank": (slurm(5, 8, 1, 2), 8, ProcessInfo("rank", "slurm", 5, 1, 2)),
    "Slurm, one per rank, with PMI-2": (
        slurm(5, 8, 1, 2) | {"PMI_RANK": "5", "PMI_SIZE": "8"},
        8,
        ProcessInfo("rank", "slurm", 5, 1, 2),
    ),
    "Slurm, one per node": (slurm(1, 2, 1, 2), 8, ProcessInfo("agent", "slurm", 1, 1, 2)),
    "Slurm, one per node and rank": (slurm(1, 2, 1, 2), 2, ProcessInfo("agent", "slurm", 1, 1, 2)),
    "Slurm, one node": (slurm(0, 1, 0, 1), 3, ProcessInfo("agent", "slurm", 0, 0, 1)),
    "Slurm, one rank": (slurm(0, 1, 0, 1), 1, ProcessInfo("rank", "slurm", 0, 0, 1)),
    "Slurm, interactive step": (slurm(0, 1, 0, 1, job_tasks=8), 3, ProcessInfo("agent", "slurm", 0, 0, 1)),
}


@pytest.mark.parametrize(("environ", "world_size", "expected"), PLACES.values(), ids=PLACES)
def test_rank_and_node_follow_from_launcher_variables(environ: Environ, world_size: int, expected: ProcessInfo) -> None:
    assert find_place(environ, world_size) == expected


@pytest.mark.parametrize(
    ("environ", "world_size", "launcher", "size", "nodes"),
    [
        (torchrun(1, 2), 3, "torchrun", 2, 1),
        (torchrun(0, 4), 3, "torchrun", 4, 1),
        (openmpi(1, 4, 4), 3, "mpi", 4, 1),
        (openmpi(1, 4, 2), 8, "mpi", 4, 2),
        (slurm(1, 4, 0, 2), 8, "slurm", 4, 2),
        (slurm(1, 16, 0, 2), 8, "slurm", 16, 2),
    ],
)
def test_a_wrong_number_of_processes_is_refused_with_both_numbers(
    environ: Environ, world_size: int, launcher: str, size: int, nodes: int
) -> None:
    message = f"{launcher} started {size} processes on {nodes} node\\(s\\); this layout needs {world_size} ranks .*"
    with pytest.raises(ValueError, match=message + "one process per node") as caught:
        find_place(environ, world_size)
    assert "\n" not in str(caught.value)


def test_the_key_file_is_created_anew_and_private(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        first = make_key_file(tmp_path, "one")
        before = first.read_bytes()
        second = make_key_file(tmp_path, "two")
    finally:
        os.umask(previous)
    assert stat.S_IMODE(second.stat().st_mode) == 0o600
    assert len(before) == len(second.read_bytes()) == 32
    assert before != second.read_bytes()
    assert not first.exists()
    with pytest.raises(FileExistsError):  # it is made, never taken over
        os.close(os.open(second, os.O_WRONLY | os.O_CREAT | os.O_EXCL))


# -- the endpoint file -------------------------------------------------------------------------------------------


def place_of(rank: int) -> ProcessInfo:
    return ProcessInfo("rank", "slurm", rank, 0, 1)


def join_all(folder: Path, delay_s: float) -> list[str]:
    """Ranks 1 and 2 look for the store, rank 0 comes later; returns what each found in the store under its rank."""
    from hpcrl.messaging.messages import Shutdown
    from hpcrl.messaging.world import join, rank_queue

    def run(rank: int) -> str:
        time.sleep(delay_s * (rank == 0))
        world = join(place_of(rank), 3, folder, start_s=30, store_s=30, command_s=30)
        if rank == 0:
            for other in (1, 2):
                world.sender.send(rank_queue(other), Shutdown())
        message = world.commands.get(20) if rank else "sent"
        world.leave()
        left.wait(20)  # the store ends with rank 0's world
        return f"{message} {world.commands.refused}"

    left = threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(run, range(3)))


def test_a_second_start_in_the_same_folder_uses_its_own_store(tmp_path: Path) -> None:
    greeting = ["sent []", "(0, 1, Shutdown()) []", "(0, 1, Shutdown()) []"]
    assert join_all(tmp_path, 0.0) == greeting
    first = json.loads((tmp_path / ENDPOINT).read_text())
    assert join_all(tmp_path, 0.5) == greeting  # the others find the file of the first
    second = json.loads((tmp_path / ENDPOINT).read_text())
    assert first["world"] != second["world"]
    assert [path.name for path in tmp_path.glob("key_*")] == [f"key_{second['world']}"]


@pytest.mark.slow
def test_a_store_of_another_world_at_the_same_port_is_refused(tmp_path: Path) -> None:
    from hpcrl.messaging import queues
    from hpcrl.messaging.bootstrap import WORLD_KEY

    other = queues.serve("127.0.0.1", 10)
    endpoint = {"host": "127.0.0.1", "port": other.port, "key_file": "key", "world": "mine"}
    share_endpoint(place_of(0), tmp_path, endpoint, 1)
    with pytest.raises(TimeoutError, match=rf"no world answers at 127.0.0.1:{other.port}, named by {tmp_path}"):
        share_endpoint(place_of(1), tmp_path, None, 0.3)
    other.set(WORLD_KEY, "another")
    with pytest.raises(TimeoutError, match=r"after 0.3 s: rank 0 has not come up"):
        share_endpoint(place_of(1), tmp_path, None, 0.3)
    other.set(WORLD_KEY, "mine")
    assert share_endpoint(place_of(1), tmp_path, None, 5) == endpoint


def test_waiting_for_rank_0_times_out(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"no {tmp_path / ENDPOINT} after 0.2 s: rank 0 has not come up"):
        share_endpoint(place_of(1), tmp_path, None, 0.2)
    assert time.monotonic() - start < 20


@pytest.mark.slow
def test_waiting_for_rank_0_ignores_a_pause_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcrl.messaging import bootstrap, queues

    server = queues.serve("127.0.0.1", 10)
    server.set(bootstrap.WORLD_KEY, "mine")
    endpoint = {"host": "127.0.0.1", "port": server.port, "key_file": "key", "world": "mine"}
    waits: list[float] = []

    def wait_s(waited_s: float) -> float:
        waits.append(waited_s)
        if len(waits) == 2:
            share_endpoint(place_of(0), tmp_path, endpoint, 1)
        return 1.2 if len(waits) == 1 else 0.01

    monkeypatch.setattr(bootstrap, "backed_off_s", wait_s)
    assert share_endpoint(place_of(1), tmp_path, None, 1.0) == endpoint and waits[1] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("hosted", [False, True], ids=["own store", "torchrun's store"])
def test_torchrun_ranks_share_through_its_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hosted: bool) -> None:
    from hpcrl.messaging import queues

    server = queues.serve("127.0.0.1", 20)
    port = server.port
    if not hosted:  # rank 0 serves on torchrun's port
        del server
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    for name, value in (environ | {"TORCHELASTIC_USE_AGENT_STORE": str(hosted)}).items():
        monkeypatch.setenv(name, value)
    for restart in ("0", "1"):  # the store may outlive the ranks
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        endpoint = {"host": "h", "port": 1, "key_file": "k", "world": restart}

        def share(rank: int, endpoint: dict = endpoint) -> dict:
            place = replace(place_of(rank), launcher="torchrun")
            time.sleep(0.3 * (rank == 2))  # rank 0's store must wait for the last
            return share_endpoint(place, tmp_path, endpoint if rank == 0 else None, 20)

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(share, range(3))) == [endpoint] * 3


# -- real starts -------------------------------------------------------------------------------------------------


def prepare_run(run_dir: Path, max_steps: int, *more: str) -> int:
    """The launcher's work before it starts ranks; returns the attempt."""
    from hpcrl.launch.prepare import prepare
    from hpcrl.run_folder import close_run, open_run

    words = ["+experiment=demo_sft", f"run_dir={run_dir}", f"max_steps={max_steps}", "sft.batch_size=8"]
    words += ["eval_every=0", "sft.stop_score=null", *more]
    config, *_ = prepare(words)
    opened = open_run(config.model_dump(mode="json"), config.run_dir, config.resume)
    close_run(opened.run_dir, opened.attempt)
    return opened.attempt


def start(command: list[str], run_dir: Path, attempt: int) -> None:
    """Run the program in every process that `command` starts; exit code 0."""
    own = ("SLURM_", "PMI", "OMPI_", "TORCHELASTIC_", "HPCRL_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "HPCRL_ATTEMPT": str(attempt)}
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [*command, str(run_dir)], env=environ, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "run"


def steps_done(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


WATCHER = """import importlib.abc, json, os, sys
class Watcher(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "hpcrl.engines.train.fsdp2.engine":
            names = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "TRITON_CACHE_DIR")
            print(json.dumps([os.environ.get(name) for name in names]), file=sys.__stdout__, flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watcher())
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "mpi", "slurm"])
def test_engines_are_imported_after_the_rank_is_bound_to_one_gpu(tmp_path: Path, launcher: str) -> None:
    """Libraries may look for GPUs when they are imported, and CUDA looks once."""
    attempt = prepare_run(tmp_path / "run", 1, "cluster.device=auto")
    (tmp_path / "sitecustomize.py").write_text(WATCHER)
    starts = {"torchrun": torchrun(2, 3), "mpi": openmpi(2, 3, 3) | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}}
    environ = os.environ | {"PYTHONPATH": str(tmp_path), "HPCRL_ATTEMPT": str(attempt), "OMP_NUM_THREADS": "1"}
    environ |= starts.get(launcher, slurm(2, 3, 0, 1)) | {
        "CUDA_VISIBLE_DEVICES": "GPU-4a,GPU-7f",
        "TMPDIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "hpcrl.run", str(tmp_path / "run")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    gpus, local_rank, cache = json.loads(done.stdout)
    assert (gpus, local_rank) == ("GPU-7f", "0"), done.stderr
    assert Path(cache).is_dir() and tmp_path in Path(cache).parents, "home has a small quota, and all nodes share it"
    few = subprocess.run(
        command, env=environ | {"CUDA_VISIBLE_DEVICES": "4"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert few.returncode == ExitCode.BAD_INPUT and len(few.stderr.splitlines()) == 1
    assert "this node has 1 GPU(s) for 2 ranks" in few.stderr


@pytest.mark.slow
def test_a_run_under_torchrun_trains(run_dir: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m", "hpcrl.run"]
    attempt = prepare_run(run_dir, 2)
    start(command, run_dir, attempt)
    assert steps_done(run_dir) == [1, 2]
    for rank in range(3):  # which no agent writes
        text = (log_folder(run_dir, attempt) / f"rank_{rank:04d}.log").read_text()
        assert f" rank {rank} INFO process " in text and ("INFO step 2/2 " in text) == (rank == 0)
    assert (run_dir / "hf" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("mpirun") and importlib.util.find_spec("mpi4py")),
    reason="MPI is not installed (openmpi-bin and the extra: mpi)",
)
def test_a_run_under_mpirun_resumes_a_checkpoint_of_another_launcher(run_dir: Path) -> None:
    before = steps_done(run_dir) if (run_dir / "metrics.jsonl").exists() else []
    attempt = prepare_run(run_dir, len(before) + 2)
    start(["mpirun", "--oversubscribe", "-n", "3", sys.executable, "-m", "hpcrl.run"], run_dir, attempt)
    assert steps_done(run_dir) == [*before, len(before) + 1, len(before) + 2]


@contextlib.contextmanager
def under_torchrun(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """A run in its second step, and its ranks."""
    attempt = prepare_run(folder / "run", 1000, "timeouts.store_s=6")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m", "hpcrl.run"]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HPCRL_ATTEMPT": str(attempt)}
    with open(folder / "log", "w") as log:
        run = subprocess.Popen([*command, str(folder / "run")], env=environ, stdout=log, stderr=subprocess.STDOUT)
    ranks: list[psutil.Process] = []
    try:
        while not ((folder / "run/metrics.jsonl").exists() and len(steps_done(folder / "run")) > 1):
            assert run.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        ranks += sorted(psutil.Process(run.pid).children(), key=psutil.Process.name)
        yield run, ranks
    finally:
        for process in (run, *ranks):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_a_stopped_rank_ends_the_run_under_torchrun(
    tmp_path: Path, rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an agent, another rank of the node notices it, and the ranks give their stacks by themselves."""
    with under_torchrun(tmp_path) as (run, ranks):
        assert stacks.main([str(tmp_path / "run"), "--local"]) == 0
        out = capsys.readouterr().out
        assert [int(pid) for pid in re.findall(r"^rank \d .*, process (\d+): in ", out, re.M)] == [p.pid for p in ranks]
        assert out.count("main thread (most recent call first):\n") == 3
        began = time.monotonic()
        ranks[rank].send_signal(signal.SIGSTOP)
        assert run.wait(60) != 0
        assert time.monotonic() - began < 25  # 3 s, the controller's 15 at most, and torchrun's own looks
        assert f"killed rank {rank}, which was stopped (SIGSTOP) for" in (tmp_path / "log").read_text()
        if rank:
            report = hang_path(tmp_path / "run", 1).read_text()
            # Rank 2 may have ended, since it lost its connection to rank 1, before it is asked.
            num_stacks = report.count("main thread (most recent call first):\n")
            assert num_stacks + ("no stack: the process has ended" in report) == 2
            assert "no answer about rank 1" in report


@pytest.mark.slow
def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    with under_torchrun(tmp_path) as (run, ranks):
        run.kill()
        gone, alive = psutil.wait_procs(ranks, timeout=20)
        assert len(gone) == 3 and not alive


@pytest.mark.slow
def test_a_signal_to_every_rank_saves_a_checkpoint(tmp_path: Path) -> None:
    """As torchrun forwards a signal, and as Slurm sends it to one task per rank."""
    with under_torchrun(tmp_path) as (run, _):
        run.terminate()
        assert run.wait(60) != 0
        last = steps_done(tmp_path / "run")[-1]
        assert (tmp_path / "run/checkpoints" / f"step_{last:06d}").is_dir(), (tmp_path / "log").read_text()


def test_polling_slows_down_during_long_waits() -> None:
    waited_s, looks = 0.0, 0
    while waited_s < 60:
        waited_s += backed_off_s(waited_s)
        looks += 1
        assert backed_off_s(waited_s) <= max(0.02, min(waited_s / 20, 1.0)), "what it waits for is seen soon"
    assert looks < 150, "50 a second from each of hundreds of ranks would be a load"
