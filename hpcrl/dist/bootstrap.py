"""Who am I: rank and world from the node agent, torchrun, MPI or Slurm; and how all ranks learn where the store is."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Place:
    """Where this process stands.

    kind: "rank" is one rank of the world; "agent" starts the ranks of its node. launcher: who started the process.
    """

    kind: Literal["rank", "agent"]
    launcher: Literal["agent", "torchrun", "mpi", "slurm", "local"]
    index: int  # the rank, or the node's number
    node: int
    num_nodes: int


def _count(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def find_place(environ: Mapping[str, str], world_size: int) -> Place:
    """Place of this process in a world of `world_size` ranks, from environment variables alone.

    ValueError when a launcher started a number of processes that is neither one per rank nor one per node.
    """
    if "HPCRL_RANK" in environ:
        node, nodes = int(environ.get("HPCRL_NODE", "0")), int(environ.get("HPCRL_NUM_NODES", "1"))
        return Place("rank", "agent", int(environ["HPCRL_RANK"]), node, nodes)
    launchers = (
        ("torchrun", "TORCHELASTIC_RUN_ID", ("RANK",), ("WORLD_SIZE",), ("GROUP_RANK",), ("GROUP_WORLD_SIZE",)),
        ("mpi", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), (), ()),
        ("slurm", "SLURM_STEP_ID", ("SLURM_PROCID",), ("SLURM_NTASKS",), ("SLURM_NODEID",), ("SLURM_NNODES",)),
        ("mpi", "PMI_SIZE", ("PMI_RANK",), ("PMI_SIZE",), (), ()),
    )
    for launcher, marker, rank_names, size_names, node_names, nodes_names in launchers:
        size, rank = _count(environ, *size_names), _count(environ, *rank_names)
        if marker not in environ or size is None or rank is None:
            continue
        node, nodes = _count(environ, *node_names) or 0, _count(environ, *nodes_names) or 1
        if size == world_size and (size > nodes or world_size == 1):
            return Place("rank", launcher, rank, node, nodes)
        if size == nodes:
            return Place("agent", launcher, node, node, nodes)
        raise ValueError(
            f"{launcher} started {size} processes on {nodes} node(s); this layout needs {world_size} ranks "
            f"(one process each) or one process per node, whose agent starts the ranks"
        )
    return Place("agent", "local", 0, 0, 1)


def share_endpoint(place: Place, folder: Path, endpoint: dict[str, str | int] | None, timeout_s: float) -> dict:
    """Rank 0 gives {host, port, key_file}, every rank gets it back. Collective over all ranks.

    Through torchrun's store, an MPI broadcast, or a file in `folder` (the agent's world folder, new for every attempt).
    TimeoutError names the file and the seconds.
    """
    if place.launcher == "mpi":
        from mpi4py import MPI

        return MPI.COMM_WORLD.bcast(endpoint, root=0)
    if place.launcher == "torchrun":
        from torch.distributed import TCPStore

        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=endpoint is not None and not hosted,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if endpoint is not None:
            store.set(f"hpcrl/endpoint/{attempt}", json.dumps(endpoint))
        return json.loads(store.get(f"hpcrl/endpoint/{attempt}"))
    path = folder / "endpoint.json"
    if endpoint is not None:
        tmp = path.with_suffix(".tmp")
        tmp.write_text(json.dumps(endpoint))
        tmp.replace(path)
        return endpoint
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not publish {path} within {timeout_s:g} s")
        time.sleep(0.02)
    return json.loads(path.read_text())


def make_key_file(folder: Path) -> Path:
    """A new random 32-byte job key in a file that only this user can read."""
    path = folder / "key"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(os.urandom(32))
    return path
