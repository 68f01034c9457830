"""Binds processes to the CPUs of their GPU's NUMA node: host memory is allocated on the node of the process that first
touches it, and copies between this memory and another node's GPU use the link between the processors."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any


def address_of(gpu: Any) -> str:
    """The PCI address, as in /sys/bus/pci/devices, of a GPU as torch.cuda.get_device_properties() describes it."""
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def bind_to_gpu(pci: str, threads: int, root: Path = Path("/")) -> set[int]:
    """Bind this process, its threads and its later children to its allowed CPUs on the GPU's NUMA node, and return
    these; memory touched from then on is allocated there. Empty, with nothing changed, if the node is unknown or has
    fewer than `threads` allowed CPUs, or if the process is already bound to one node. `pci` is from address_of();
    `root` is the folder that contains /sys."""
    allowed, nodes = os.sched_getaffinity(0), _nodes(root)
    try:
        node = int((root / "sys/bus/pci/devices" / pci / "numa_node").read_text())
    except (OSError, ValueError):
        return set()
    own = nodes.get(node, set()) & allowed
    if len(own) < threads or any(allowed <= cpus for cpus in nodes.values()):
        return set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread), own)
    return own


def _nodes(root: Path) -> dict[int, set[int]]:
    """The CPUs of each NUMA node."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    return {int(folder.name.removeprefix("node")): _numbers((folder / "cpulist").read_text()) for folder in folders}


def _numbers(text: str) -> set[int]:
    """The numbers in a list such as 0-3,8,10-11."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in spans for number in range(int(first), int(last or first) + 1)}
