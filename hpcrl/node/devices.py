"""Assignment of GPUs to ranks: one for each rank that holds a model, none for other ranks.

Torch's ROCm builds call AMD GPUs cuda, too. HIP reads HIP_VISIBLE_DEVICES or, if that is empty, CUDA_VISIBLE_DEVICES,
as indices into the GPUs that ROCR_VISIBLE_DEVICES leaves visible
(https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html; rocclr/device/rocm/rocdevice.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from hpcrl.node.amd import AmdGpu, amd_gpus

VISIBLE, HIP_VISIBLE, ROCR_VISIBLE = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
HIDDEN = ""
NO_FILES = "NoDevFiles"
"""Slurm's CUDA_VISIBLE_DEVICES in a job without GPUs."""
ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
"""CUDA numbers the fastest GPU first by default; with this value it numbers GPUs by bus, as nvidia-smi does."""
DEVICE = re.compile(r"[0-9]+|GPU-[0-9A-Fa-f-]+|MIG-\S+")
"""A number, the UUID of a GPU or MIG part, or the beginning of a UUID."""


def check_device(gpus: str, found: bool, torch_version: str) -> None:
    """ValueError if a process cannot compute on the GPUs assigned to it: a CPU would take a thousand times as long.
    `gpus` is its CUDA_VISIBLE_DEVICES and `found` is torch.cuda.is_available()."""
    if gpus and not found:
        raise ValueError(
            f"cluster.device: GPU {gpus} is assigned to this rank, but torch {torch_version} finds none (a build "
            "without CUDA or ROCm, or for a newer driver); install torch for this driver, or set cluster.device=cpu"
        )


def num_nvidia(devices: Path = Path("/dev")) -> int:
    """Number of NVIDIA GPUs on this node, from the folder of device files."""
    return sum(path.name[6:].isdigit() for path in devices.glob("nvidia*"))


def described_amd(devices: Path = Path("/dev")) -> list[AmdGpu] | None:
    """This node's AMD GPUs as the kernel describes them in the folder sys beside `devices`; None if it describes none,
    as in some containers. Empty if there are NVIDIA GPUs."""
    there = (devices / "kfd").exists() and not num_nvidia(devices)
    return amd_gpus(devices.parent / "sys") if there else []


def num_amd(devices: Path = Path("/dev")) -> int:
    """Number of AMD GPUs that this process may use on this node; 0 if there are NVIDIA GPUs."""
    gpus = described_amd(devices)
    return len(list((devices / "dri").glob("renderD*"))) if gpus is None else len(gpus)


def amd_names(devices: Path = Path("/dev")) -> str:
    """The names of this node's AMD GPUs, each once, such as "AMD Instinct MI250X"; empty if the kernel tells none."""
    return ", ".join(dict.fromkeys(gpu.name for gpu in described_amd(devices) or ()))


def visible_amd(environ: Mapping[str, str], devices: Path = Path("/dev")) -> dict[str, AmdGpu]:
    """Entry of visible_gpus() -> the AMD GPU, for GPUs that the kernel describes."""
    gpus: Sequence[AmdGpu | None] = described_amd(devices) or ()
    if ROCR_VISIBLE in environ:
        gpus = [_named_by(name, gpus) for name in _named(environ[ROCR_VISIBLE])]
    found = {name: _named_by(name, gpus) for name in visible_gpus(environ, devices)}
    return {name: gpu for name, gpu in found.items() if gpu is not None}


def _named_by(name: str, gpus: Sequence[AmdGpu | None]) -> AmdGpu | None:
    """The GPU with this number or beginning of a UUID."""
    if name.isdigit():
        return gpus[int(name)] if int(name) < len(gpus) else None
    return next((gpu for gpu in gpus if gpu is not None and gpu.uuid.lower().startswith(name.lower())), None)


def visible_by(environ: Mapping[str, str], devices: Path = Path("/dev")) -> str:
    """The variable that lists the GPUs this process may use; empty if none does."""
    if not num_amd(devices):
        return VISIBLE if VISIBLE in environ else ""
    name = HIP_VISIBLE if environ.get(HIP_VISIBLE) else VISIBLE
    left = environ.get(ROCR_VISIBLE)
    if environ.get(name) in (None, left):  # Slurm writes one list into the variables of all vendors
        return "" if left is None else ROCR_VISIBLE
    return name


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs this process may use, from CUDA_VISIBLE_DEVICES; without this variable, all GPUs of the node. On a node
    with AMD GPUs, also from HIP's and ROCr's variables; there, too, an empty CUDA_VISIBLE_DEVICES means none."""
    name = visible_by(environ, devices)
    gpus = _named(environ[name]) if name else [""] * (num_amd(devices) or num_nvidia(devices))
    return [str(number) for number in range(len(gpus))] if name in ("", ROCR_VISIBLE) else gpus


def _named(text: str) -> list[str]:
    """CUDA, HIP and ROCr stop at the first entry that is not a device, such as NO_FILES. 01 is 1."""
    names = [name.strip() for name in text.split(",")]
    named = names[: next((i for i, name in enumerate(names) if not DEVICE.fullmatch(name)), len(names))]
    return [(name.lstrip("0") or "0") if name.isdigit() else name for name in named]


def misnamed(environ: Mapping[str, str], devices: Path = Path("/dev")) -> str:
    """Why CUDA, HIP or ROCr would misread its list of visible GPUs, as "this node ..."; empty if none does."""
    num = num_amd(devices)
    left = len(_named(environ[ROCR_VISIBLE])) if ROCR_VISIBLE in environ else num
    for name, most in ({visible_by(environ, devices): left} | ({ROCR_VISIBLE: num} if num else {})).items():
        gpus = _named(environ.get(name, ""))
        shown = f"{name}={','.join(gpus)}"
        if name != ROCR_VISIBLE and len({gpu.partition("-")[0] if "-" in gpu else "" for gpu in gpus}) > 1:
            return f"has {shown}, but CUDA reads either numbers or GPU- or MIG- names: use one kind"
        if len(set(gpus)) < len(gpus):
            return f"has {shown}, which names a GPU twice: name each GPU once"
        if num and any(gpu.isdigit() and int(gpu) >= most for gpu in gpus):
            what = "" if name == ROCR_VISIBLE else f", which index the GPUs that {ROCR_VISIBLE} leaves"
            return f"has {most} AMD GPU(s) to choose from, numbered from 0, but {shown}: correct its numbers{what}"
    return ""


def own_devices(gpus: str) -> dict[str, str]:
    """Environment variables of a rank with these GPUs, of which the first is its own. Libraries use LOCAL_RANK, which
    launchers set to the process's index on its node, as the GPU's index."""
    return {VISIBLE: gpus, HIP_VISIBLE: gpus or "-1", "LOCAL_RANK": "0"}  # HIP ignores an empty list


def bind_gpus(
    ranks: Sequence[int], with_model: Sequence[int], gpus: Sequence[str], device: Literal["auto", "cpu", "cuda"]
) -> dict[int, str]:
    """CUDA_VISIBLE_DEVICES of each of a node's ranks. With device="auto", a node without GPUs uses the CPU. ValueError
    if a node has fewer GPUs than ranks with a model, since NCCL supports one rank per GPU, unless device="cpu"."""
    holders = [rank for rank in ranks if rank in with_model]
    if len(gpus) < len(holders) and (device == "cuda" or (device == "auto" and gpus)):
        raise ValueError(
            f"cluster.device: {device}, but this node has {len(gpus)} GPU(s) for {len(holders)} ranks that hold a "
            "model; give the layout fewer ranks, or set cluster.device=cpu"
        )
    if device == "cpu" or not gpus:
        return dict.fromkeys(ranks, HIDDEN)
    return dict.fromkeys(ranks, HIDDEN) | dict(zip(holders, gpus, strict=False))


def show_peers(bound: Mapping[int, str], groups: Sequence[Sequence[int]]) -> dict[int, str]:
    """bind_gpus()'s result, but each rank also sees, after its own GPU, the GPUs of its group's ranks on the node."""
    lists = dict(bound)
    for group in groups:
        for rank in group:
            if bound.get(rank):
                others = [bound[other] for other in group if other != rank and bound.get(other)]
                lists[rank] = ",".join([bound[rank], *others])
    return lists
