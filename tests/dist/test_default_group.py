"""The default group of an engine is no full mesh: pairs connect when they first talk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SIZE = 3

MEMBER = """
import json, os, sys, time
from pathlib import Path
import psutil, torch
import torch.distributed as dist
from hpcrl.dist.bootstrap import Place
from hpcrl.dist.world import join
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
def connections():
    return sum(c.status == "ESTABLISHED" for c in psutil.Process().net_connections(kind="tcp"))
def meet(name):
    world.store.set(f"{name}/{rank}", "")
    world.store.wait([f"{name}/{other}" for other in range(3)])
    time.sleep(.2)
world = join(Place("rank", "agent", rank, 0, 1), 3, folder, start_s=60, store_s=60, command_s=20)
meet("joined")
counts = [connections()]
world.default_group("trainer", [0, 1, 2], 0)
meet("grouped")
counts.append(connections())
ones = torch.ones(3)
dist.all_reduce(ones)
meet("talked")
counts.append(connections())
(folder / f"result_{rank}").write_text(json.dumps([counts, ones.tolist()]))
meet("done")
world.leave()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("lazy", "early"), [(None, 0), ("0", SIZE - 1)], ids=["as it is", "negative control"])
def test_pairs_connect_when_they_talk(tmp_path: Path, lazy: str | None, early: int) -> None:
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environ |= {"TORCH_GLOO_LAZY_INIT": lazy} if lazy is not None else {}
    command = [sys.executable, "-c", MEMBER]
    members = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=environ) for rank in range(SIZE)]
    try:
        assert [member.wait(60) for member in members] == [0] * SIZE
    finally:
        for member in members:
            member.kill()
            member.wait()
    for rank in range(SIZE):
        (joined, grouped, talked), total = json.loads((tmp_path / f"result_{rank}").read_text())
        assert grouped - joined == early
        assert talked - joined > 0 and total == [SIZE] * 3
