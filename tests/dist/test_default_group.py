"""The default group of an engine is not a full mesh: pairs connect when they first talk. Its members, and members of
groups made inside it, wait for each other as long as a command may take."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SIZE = 3

MEMBER = """
import json, os, sys, time
from datetime import timedelta
from pathlib import Path
import psutil, torch
import torch.distributed as dist
from hpcrl.messaging.bootstrap import ProcessInfo
from hpcrl.messaging.world import join
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
def connections():
    return sum(c.status == "ESTABLISHED" for c in psutil.Process().net_connections(kind="tcp"))
def meet(name):
    world.store.set(f"{name}/{rank}", "")
    world.store.wait([f"{name}/{other}" for other in range(3)])
    time.sleep(.2)
class Lazy(dist.ProcessGroup):  # as NCCL, it fetches its communicator's id at the first use, from the store that it got
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.given = store
    def getBackendName(self):
        return "lazy"
    def allreduce(self, tensors, options=None):
        if self.rank() == 0:
            self.given.set("id", "of the communicator")
        self.given.get("id")
        work = torch.futures.Future()
        work.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(work)
def first_use_of_groups_inside():
    dist.Backend.register_backend("lazy", Lazy, devices=["cpu"])
    world.store.set_timeout(timedelta(seconds=1))
    groups = [dist.new_group(backend="lazy"), dist.new_group([0, 2], backend="lazy")]
    time.sleep(2.5 if rank == 0 else 0)
    for group in groups[: 1 if rank == 1 else 2]:
        dist.all_reduce(torch.ones(1), group=group)
    world.store.set_timeout(timedelta(seconds=60))
world = join(ProcessInfo("rank", "agent", rank, 0, 1), 3, folder, start_s=60, store_s=60, command_s=20)
world._rendezvous_store  # its connection is no pair's
meet("joined")
counts = []
for epoch, lazy in enumerate((None, "0")):
    if lazy is not None:
        os.environ["TORCH_GLOO_LAZY_INIT"] = lazy
    before = connections()
    world.default_group("trainer", [0, 1, 2], epoch)
    meet(f"grouped/{epoch}")
    grouped = connections()
    ones = torch.ones(3)
    dist.all_reduce(ones)
    meet(f"talked/{epoch}")
    counts.append([grouped - before, connections() - before, *ones.tolist()])
    if lazy is None:
        first_use_of_groups_inside()
    dist.destroy_process_group()
    meet(f"left/{epoch}")
(folder / f"result_{rank}").write_text(json.dumps(counts))
meet("done")
world.leave()
os._exit(0)
"""


@pytest.mark.slow
def test_pairs_connect_at_their_first_message(tmp_path: Path) -> None:
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-c", MEMBER]
    members = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=environ) for rank in range(SIZE)]
    try:
        assert [member.wait(60) for member in members] == [0] * SIZE
    finally:
        for member in members:
            member.kill()
            member.wait()
    peers = SIZE - 1
    for rank in range(SIZE):
        as_it_is, at_once = json.loads((tmp_path / f"result_{rank}").read_text())
        assert as_it_is[0] == 0 < as_it_is[1] <= peers
        assert at_once[:2] == [peers, peers]  # torch's default: the connections would be visible
        assert as_it_is[2:] == at_once[2:] == [SIZE] * 3


SUSPENDED = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from hpcrl.messaging.bootstrap import ProcessInfo
from hpcrl.messaging.world import join
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
distributed_c10d.default_pg_timeout = timedelta(seconds=5)  # torch's is 30 minutes, NCCL's 10
world = join(ProcessInfo("rank", "agent", rank, 0, 1), 2, folder, start_s=60, store_s=60, command_s=5)
world.default_group("trainer", [0, 1], 0)
group = dist.new_group([0, 1])
for number, used in enumerate((None, group)):
    dist.all_reduce(torch.ones(3), group=used)  # connects
    if rank:
        while not (folder / f"go_{number}").exists():
            time.sleep(.02)
    else:
        (folder / f"waits_{number}").touch()
    dist.all_reduce(torch.ones(3), group=used)
world.leave()
os._exit(0)
"""


@pytest.mark.slow
def test_a_collective_continues_after_its_job_was_suspended(tmp_path: Path) -> None:
    """In the default group, and in one that an engine makes with torch's default timeout."""
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    members = [subprocess.Popen([sys.executable, "-c", SUSPENDED, str(n), str(tmp_path)], env=environ) for n in (0, 1)]
    try:
        for number in range(2):
            deadline = time.monotonic() + 60
            while not (tmp_path / f"waits_{number}").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(0.3)
            for member in members:
                member.send_signal(signal.SIGSTOP)
            time.sleep(5.5)
            for member in members:
                member.send_signal(signal.SIGCONT)
            time.sleep(0.2)
            (tmp_path / f"go_{number}").touch()
        assert [member.wait(60) for member in members] == [0, 0]
    finally:
        for member in members:
            member.kill()
