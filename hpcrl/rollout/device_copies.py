"""Copies between host memory and a GPU with as few synchronizations as possible.

A copy from or to pageable memory blocks the host until the GPU has finished all earlier work; then the GPU idles until
the host launches more. Copies from and to pinned memory do not block.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device without blocking. PyTorch keeps the pinned memory until the GPU has read it."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copy tensors of one device to host memory, with one synchronization for all; host tensors are returned as is."""
    given = list(tensors)
    copies = [tensor.to("cpu", non_blocking=True) for tensor in given]
    if given and given[0].is_cuda:
        torch.cuda.current_stream(given[0].device).synchronize()
    return copies
