"""Copies between host memory and a GPU for which the host waits as little as possible.

A copy from ordinary memory, and each copy to it, makes the host wait until the GPU has done what it was asked before,
and the GPU then has nothing to do until the host has asked for more. Copies from and to pinned memory do not.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device, without a wait. PyTorch keeps the pinned memory until the GPU has read it."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors of one device in host memory, after one wait for all of them; those that are there as they are."""
    given = list(tensors)
    copies = [tensor.to("cpu", non_blocking=True) for tensor in given]
    if given and given[0].is_cuda:
        torch.cuda.current_stream(given[0].device).synchronize()
    return copies
