"""A rank runs on the CPUs next to its GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcrl.node.numa import address_of

CPUS = sorted(os.sched_getaffinity(0))
PCI = "0000:c1:00.0"

CHILD = """
import json, os, sys, threading
from pathlib import Path
from hpcrl.node.numa import bind_to_gpu
root, pci, threads, allowed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
os.sched_setaffinity(0, allowed)
end = threading.Event()
older = threading.Thread(target=end.wait)
older.start()
bound = bind_to_gpu(pci, threads, root)
seen = [sorted(os.sched_getaffinity(pid)) for pid in (0, older.native_id)]
end.set()
print(json.dumps([sorted(bound), *seen]))
"""


def test_the_pci_address_of_a_gpu_has_the_systems_form() -> None:
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    assert address_of(gpu) == PCI


def machine(root: Path, node: int, *cpulists: str) -> Path:
    device = root / "sys/bus/pci/devices" / PCI
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    for number, cpus in enumerate(cpulists):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    return root


def bound(root: Path, pci: str = PCI, threads: int = 1, allowed: list[int] = CPUS) -> list[list[int]]:
    """The CPUs to which a new process binds itself, and afterwards the CPUs of its main thread and of an older
    thread."""
    words = [sys.executable, "-c", CHILD, str(root), pci, str(threads), json.dumps(allowed)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    found: list[list[int]] = json.loads(done.stdout)
    return found


def grace(root: Path, reported: int, distances: str) -> Path:
    """A node with GH200, as its system describes it: processors 0 and 1, and two nodes of each GPU's memory."""
    machine(root, reported, f"{CPUS[0]}", f"{CPUS[1]}-{CPUS[-1]}", "", "", "", "")
    if distances:
        (root / f"sys/devices/system/node/node{reported}/distance").write_text(f"{distances}\n")
    return root


pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="one CPU")


def test_a_process_and_its_threads_run_on_the_numa_node_of_their_gpu(tmp_path: Path) -> None:
    first, *others = CPUS
    root = machine(tmp_path, 1, f"{others[0]}-{others[-1]}", f"{first},{max(CPUS) + 1}-{max(CPUS) + 64}")
    assert bound(root) == [[first]] * 3, "the other CPUs of the node are not allowed, as in a job's cpuset"


@pytest.mark.parametrize(
    ("node", "pci", "threads", "allowed"),
    [
        (-1, PCI, 1, CPUS),  # a machine without nodes
        (1, "0000:00:1f.0", 1, CPUS),
        (1, PCI, 2, CPUS),
        (1, PCI, 1, CPUS[1:]),  # within the other node: bound by a launcher
    ],
    ids=["no node", "unknown", "too few CPUs", "bound"],
)
def test_unbound_process_keeps_its_cpus(node: int, pci: str, threads: int, allowed: list[int], tmp_path: Path) -> None:
    root = machine(tmp_path, node, ",".join(map(str, CPUS[1:])), f"{CPUS[0]}")
    assert bound(root, pci, threads, allowed) == [[], allowed, allowed]


def test_a_machine_with_one_numa_node_is_not_changed(tmp_path: Path) -> None:
    assert bound(machine(tmp_path, 0, f"0-{max(CPUS)}")) == [[], CPUS, CPUS]


@pytest.mark.parametrize(
    ("reported", "distances", "node"),
    [
        (0, "10 40 80 80 120 120", 0),
        (1, "", 1),
        (4, "120 80 255 255 10 255", 1),  # the system names the GPU's own memory
        (3, "80 120 255 10 255 255", 0),
        (3, "80 80 255 10 255 255", None),
        (3, "80 120 255", None),
        (3, "", None),
        (9, "", None),
    ],
)
def test_a_rank_of_a_grace_processor_is_never_bound_to_a_node_of_gpu_memory(
    reported: int, distances: str, node: int | None, tmp_path: Path
) -> None:
    own = {0: CPUS[:1], 1: CPUS[1:], None: []}[node]
    assert bound(grace(tmp_path, reported, distances)) == [own, *[own or CPUS] * 2]
