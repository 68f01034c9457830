"""Get this process's rank from the node agent, torchrun, MPI or Slurm, and share the store's address with all ranks."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hpcrl.system.clock import AwakeClock
from hpcrl.system.files import backed_off_s

ENDPOINT = "endpoint.json"
WORLD_KEY = "hpcrl/world"
PROBE_S = 2.0


@dataclass(frozen=True)
class ProcessInfo:
    """This process's position in the world.

    Args:
        kind: "rank" is one rank of the world; "agent" starts its node's ranks.
        launcher: The program that started the process.
    """

    kind: Literal["rank", "agent"]
    launcher: Literal["agent", "torchrun", "mpi", "slurm", "local"]
    index: int  # the rank, or the node's number
    node: int
    num_nodes: int


class _Launcher(NamedTuple):
    """A launcher's environment variables, in order of preference. `local` names the number of processes on this node,
    for launchers that do not number nodes."""

    name: Literal["torchrun", "mpi", "slurm"]
    marker: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    node: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    local: tuple[str, ...] = ()


# Inner launchers come first: torchrun and MPI may run inside a Slurm step. Slurm's own PMI sets PMI_SIZE, but not
# MPI_LOCALNRANKS. Inside a step, SLURM_NTASKS may still hold the job's number of tasks.
_LAUNCHERS = (
    _Launcher("torchrun", "TORCHELASTIC_RUN_ID", ("RANK",), ("WORLD_SIZE",), ("GROUP_RANK",), ("GROUP_WORLD_SIZE",)),
    _Launcher(
        "mpi",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        local=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher("mpi", "MPI_LOCALNRANKS", ("PMI_RANK",), ("PMI_SIZE",), local=("MPI_LOCALNRANKS",)),
    _Launcher(
        "slurm",
        "SLURM_STEP_ID",
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_NODEID",),
        ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    ),
    _Launcher("mpi", "PMI_SIZE", ("PMI_RANK",), ("PMI_SIZE",), local=("PMI_LOCAL_SIZE",)),
)


def _count(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def _whole_step(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment; in a job step that spans components of a heterogeneous job, with counts summed over them."""
    num = _count(environ, ("SLURM_HET_SIZE",))
    if num is None:
        return environ
    whole = dict(environ)
    for name, of_component in (("SLURM_STEP_NUM_TASKS", "NTASKS"), ("SLURM_STEP_NUM_NODES", "JOB_NUM_NODES")):
        counts = [_count(environ, (f"SLURM_{of_component}_HET_GROUP_{i}",)) for i in range(num)]
        if all(counts):
            whole[name] = str(sum(count or 0 for count in counts))
    return whole


def find_place(environ: Mapping[str, str], world_size: int) -> ProcessInfo:
    """Find this process's place in a world of `world_size` ranks, only from environment variables. ValueError if a
    launcher started neither one process per rank nor one per node."""
    if "HPCRL_RANK" in environ:
        node, nodes = int(environ.get("HPCRL_NODE", "0")), int(environ.get("HPCRL_NUM_NODES", "1"))
        return ProcessInfo("rank", "agent", int(environ["HPCRL_RANK"]), node, nodes)
    environ = _whole_step(environ)
    for launcher in _LAUNCHERS:
        size, rank = _count(environ, launcher.size), _count(environ, launcher.rank)
        if launcher.marker not in environ or size is None or rank is None:
            continue
        local = _count(environ, launcher.local) or size
        number, nodes = _count(environ, launcher.node), _count(environ, launcher.nodes) or -(-size // local)
        node = rank // local if number is None else number
        # If one process per rank is also one per node, it is an agent that watches its rank. Under MPI, a node with
        # fewer processes computes a larger number of nodes than the other nodes, so only the process count decides.
        if size == world_size and (size > nodes or size == 1 or launcher.name == "mpi"):
            return ProcessInfo("rank", launcher.name, rank, node, nodes)
        if size == nodes:
            return ProcessInfo("agent", launcher.name, node, node, nodes)
        raise ValueError(
            f"{launcher.name} started {size} processes on {nodes} node(s); this layout needs {world_size} ranks "
            f"(one process each) or one process per node, whose agent starts the ranks"
        )
    return ProcessInfo("agent", "local", 0, 0, 1)


def share_endpoint(
    place: ProcessInfo, folder: Path, endpoint: dict[str, Any] | None, timeout_s: float
) -> dict[str, Any]:
    """Rank 0 passes {host, port, key_file, world}; every rank returns it. Collective over all ranks.

    It is shared through torchrun's store, an MPI broadcast, or a file in `folder`. An earlier start may have left such
    a file, so the store that it names must answer with its `world`. TimeoutError names the address and the seconds.
    """
    if place.launcher == "mpi":
        return _share_by_mpi(endpoint)
    if place.launcher == "torchrun":
        return _share_by_torchrun(endpoint, timeout_s)
    path, clock = folder / ENDPOINT, AwakeClock(timeout_s)
    if endpoint is not None:
        tmp = path.with_suffix(".tmp")
        tmp.write_text(json.dumps(endpoint))
        tmp.replace(path)
        return endpoint
    while True:
        found = json.loads(path.read_text()) if path.exists() else None
        if found is not None and _is_alive(found):
            return found
        waited_s = clock.now()
        if waited_s > timeout_s:
            what = f"no world answers at {found['host']}:{found['port']}, named by {path}," if found else f"no {path}"
            raise TimeoutError(f"{what} after {timeout_s:g} s: rank 0 has not come up")
        time.sleep(backed_off_s(waited_s))


def _is_alive(endpoint: dict[str, Any]) -> bool:
    """Whether the store at the endpoint belongs to the endpoint's world."""
    from torch.distributed import DistError, TCPStore

    host, port = endpoint["host"], int(endpoint["port"])
    try:
        # A refused TCPStore client would retry until its timeout.
        socket.create_connection((host, port), timeout=PROBE_S).close()
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=PROBE_S))
        return store.check([WORLD_KEY]) and store.get(WORLD_KEY).decode() == endpoint["world"]
    except (OSError, DistError):
        return False


def _share_by_mpi(endpoint: dict[str, Any] | None) -> dict[str, Any]:
    from mpi4py import MPI

    shared = MPI.COMM_WORLD.bcast(endpoint, root=0)
    # The last MPI call; without it, mpirun would treat the process as failed.
    MPI.Finalize()
    return shared


def _share_by_torchrun(endpoint: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    from torch.distributed import DistError, TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    prefix = f"hpcrl/endpoint/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    clock = AwakeClock(timeout_s)
    try:
        store = TCPStore(
            host,
            port,
            is_master=endpoint is not None and not hosted,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
        if endpoint is not None:
            store.set(prefix, json.dumps(endpoint))
        shared = json.loads(store.get(prefix))
        readers = store.add(f"{prefix}/readers", 1)
        # If torchrun hosts no store, this store must outlive its readers.
        while endpoint is not None and not hosted and readers < int(os.environ["WORLD_SIZE"]):
            if clock.now() > timeout_s:
                raise TimeoutError(f"{readers} of {os.environ['WORLD_SIZE']} ranks came up within {timeout_s:g} s")
            time.sleep(0.02)
            readers = store.add(f"{prefix}/readers", 0)
    except DistError as error:
        raise TimeoutError(
            f"no address from rank 0 in torchrun's store at {host}:{port} after {timeout_s:g} s"
        ) from error
    return shared


def make_key_file(folder: Path, world: str) -> Path:
    """Write a new random 32-byte key to a file that only this user can read; remove older keys."""
    for old in folder.glob("key_*"):
        old.unlink(missing_ok=True)
    path = folder / f"key_{world}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(os.urandom(32))
    return path
