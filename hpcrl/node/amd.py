"""AMD GPUs as the kernel's driver describes them, without ROCm.

/sys/class/kfd/kfd/topology/nodes has a folder for each processor and GPU. ROCr numbers the GPUs in this order, leaving
out those whose files a job's cgroup makes unreadable (drivers/gpu/drm/amd/amdkfd/kfd_topology.c). /sys/class/drm has a
GPU's product name and memory (https://docs.kernel.org/gpu/amdgpu/driver-misc.html).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VENDOR = 4098
"""AMD's PCI vendor id, as the topology writes it; other vendors' GPUs may be in it too."""
CARVED_BYTES = 16 << 30
"""Less memory than this is taken as the part of the host's memory that a processor's graphics reserves, of which the
screen's contents may fill most."""
TOPOLOGY, PROCESSES = "class/kfd/kfd/topology/nodes", "class/kfd/kfd/proc"


class AmdGpu(NamedTuple):
    """A GPU that this process may use; a GCD of an MI250X is one.

    Args:
        id: The driver's number, in names of its files.
        uuid: GPU- and 16 hexadecimal digits, as in ROCR_VISIBLE_DEVICES.
        name: The product's name or, if the driver does not know it, the instruction set, such as gfx90a.
        total_bytes: Memory; 0 if unknown, or if it is a part of the host's.
        used_bytes: Memory in use by all processes.
    """

    id: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int


def amd_gpus(system: Path = Path("/sys")) -> list[AmdGpu] | None:
    """The GPUs in ROCr's order; None if the kernel does not describe any node. `system` is the folder /sys."""
    folders = [folder for folder in (system / TOPOLOGY).glob("*") if folder.name.isdigit()]
    if not folders:
        return None
    return [gpu for folder in sorted(folders, key=lambda one: int(one.name)) for gpu in _gpu(folder, system)]


def _gpu(folder: Path, system: Path) -> Iterator[AmdGpu]:
    """The GPU of a folder of the topology; none for a processor, or if the job may not use it."""
    try:
        pairs = [line.split() for line in (folder / "properties").read_text().splitlines()]
        properties = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
        number = int((folder / "gpu_id").read_text())
    except (OSError, ValueError):
        return
    if not number or not properties.get("simd_count") or properties.get("vendor_id") != VENDOR:
        return
    device = system / f"class/drm/renderD{properties.get('drm_render_minor', 0)}/device"
    version = properties.get("gfx_target_version", 0)  # 90010 is gfx90a
    name = _read(device / "product_name") or f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    sizes = [_read(device / f"mem_info_vram_{what}") for what in ("total", "used")]
    total, used = (int(size) if size.isdecimal() else 0 for size in sizes)
    if total < CARVED_BYTES:
        total = used = 0
    yield AmdGpu(number, f"GPU-{properties.get('unique_id', 0):016x}", name, total, used)


def processes_on(gpu: AmdGpu, system: Path = Path("/sys")) -> list[str]:
    """The processes with memory on a GPU, as "pid 7 (300 MiB)"."""
    sizes = {file.parent.name: _read(file) for file in (system / PROCESSES).glob(f"*/vram_{gpu.id}")}
    used = {pid: int(size) for pid, size in sizes.items() if size.isdecimal() and int(size)}
    return [f"pid {pid} ({used[pid] >> 20} MiB)" for pid in sorted(used, key=lambda pid: (len(pid), pid))]


def _read(file: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text().strip()
    return ""
