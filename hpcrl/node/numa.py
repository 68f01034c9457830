"""Binds processes to the CPUs of their GPU's NUMA node: host memory is allocated on the node of the process that first
touches it, and copies between this memory and another node's GPU use the link between the processors.

A GPU of a Grace processor (GH200, GB200) has NUMA nodes for its memory, without CPUs; its processes belong to the
processor's node (https://docs.cscs.ch/running/slurm/, on GH200)."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

NODES = "sys/devices/system/node"


def address_of(gpu: Any) -> str:
    """The PCI address, as in /sys/bus/pci/devices, of a GPU as torch.cuda.get_device_properties() describes it."""
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def bind_to_gpu(pci: str, threads: int, root: Path = Path("/")) -> set[int]:
    """Bind this process, its threads and its later children to its allowed CPUs on the GPU's NUMA node, and return
    these; memory touched from then on is allocated there. If the GPU's node has no CPUs, the nearest node with CPUs
    counts. Empty, with nothing changed, if the node is unknown or has fewer than `threads` allowed CPUs, or if the
    process is already bound to one node. `pci` is from address_of(); `root` is the folder that contains /sys."""
    allowed, nodes = os.sched_getaffinity(0), _nodes(root)
    try:
        node = int((root / "sys/bus/pci/devices" / pci / "numa_node").read_text())
    except (OSError, ValueError):
        return set()
    own = (nodes.get(node) or nodes.get(_nearest(node, nodes, root), set())) & allowed
    if len(own) < threads or any(allowed <= cpus for cpus in nodes.values()):
        return set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread), own)
    return own


def _nodes(root: Path) -> dict[int, set[int]]:
    """The CPUs of each NUMA node."""
    folders = (root / NODES).glob("node[0-9]*")
    return {int(folder.name.removeprefix("node")): _numbers((folder / "cpulist").read_text()) for folder in folders}


def _nearest(node: int, nodes: dict[int, set[int]], root: Path) -> int:
    """The node with CPUs at the smallest distance from a node without; -1 if two are equally near, or none is known."""
    with contextlib.suppress(OSError, ValueError):
        distances = map(int, (root / NODES / f"node{node}/distance").read_text().split())
        near = sorted((far, other) for other, far in zip(sorted(nodes), distances, strict=True) if nodes[other])
        if near and [far for far, _ in near].count(near[0][0]) == 1:
            return near[0][1]
    return -1


def gpu_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that the machine counts as its memory, but that are memory of NVIDIA GPUs: those of NUMA nodes without CPUs
    where NVIDIA's driver is loaded. Host memory that spills into them is missing on the GPU."""
    if not (root / "proc/driver/nvidia").is_dir():
        return 0
    total = 0
    for node in (number for number, cpus in _nodes(root).items() if not cpus):
        with contextlib.suppress(OSError):
            found = re.search(r"MemTotal:\s+(\d+) kB", (root / NODES / f"node{node}/meminfo").read_text())
            total += int(found[1]) * 1024 if found else 0
    return total


def _numbers(text: str) -> set[int]:
    """The numbers in a list such as 0-3,8,10-11."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in spans for number in range(int(first), int(last or first) + 1)}
