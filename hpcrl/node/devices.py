"""Assignment of GPUs to ranks: one for each rank that holds a model, none for the others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

VISIBLE = "CUDA_VISIBLE_DEVICES"
HIDDEN = ""
DEVICE = re.compile(r"\d+|GPU-[0-9A-Fa-f-]+|MIG-\S+")
"""A number, the UUID of a GPU or of a part of one, or a beginning of a UUID."""


def check_device(gpus: str, found: bool, torch_version: str) -> None:
    """ValueError if a process that was given GPUs (its CUDA_VISIBLE_DEVICES) cannot compute on them: the CPU in their
    place would take a thousand times as long. found: torch.cuda.is_available()."""
    if gpus and not found:
        raise ValueError(
            f"cluster.device: GPU {gpus} is assigned to this rank, but torch {torch_version} finds none (a build "
            "without CUDA, or for a newer driver); install a build of torch for this driver, or set cluster.device=cpu"
        )


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs this process may use, from CUDA_VISIBLE_DEVICES; without this variable, all GPUs of the node."""
    if VISIBLE in environ:
        names = [name.strip() for name in environ[VISIBLE].split(",")]
        # CUDA stops at the first entry that is not a device, such as NoDevFiles, which Slurm gives a job without GPUs.
        return names[: next((i for i, name in enumerate(names) if not DEVICE.fullmatch(name)), len(names))]
    return [str(number) for number in range(sum(path.name[6:].isdigit() for path in devices.glob("nvidia*")))]


def own_devices(gpus: str) -> dict[str, str]:
    """Environment variables of a rank with these GPUs, of which the first is its own. Libraries take LOCAL_RANK, which
    launchers set to the process's number on its node, for the number of its GPU."""
    return {VISIBLE: gpus, "LOCAL_RANK": "0"}


def bind_gpus(
    ranks: Sequence[int], with_model: Sequence[int], gpus: Sequence[str], device: Literal["auto", "cpu", "cuda"]
) -> dict[int, str]:
    """Rank -> its CUDA_VISIBLE_DEVICES, for the ranks of one node. auto: the CPU if the node has no GPU. ValueError if
    the node has fewer GPUs than ranks with a model, since NCCL supports one rank per GPU, unless device="cpu"."""
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
    """The same for ranks that also see the GPUs of the others of their group on the node, behind their own."""
    lists = dict(bound)
    for group in groups:
        for rank in group:
            if bound.get(rank):
                others = [bound[other] for other in group if other != rank and bound.get(other)]
                lists[rank] = ",".join([bound[rank], *others])
    return lists
