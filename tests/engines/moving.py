"""Moves of an engine's state on a machine without another memory: copies, and what they left is overwritten."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


class Left:
    """Memory from which something moved."""

    def __init__(self) -> None:
        self._storages: list[torch.UntypedStorage] = []

    def copy(self, storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
        """In place of hpcrl.engines.train.deepspeed.places._copy."""
        self._storages.append(storage)
        return storage.clone()

    def moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        """In place of hpcrl.engines.train.moving.moved."""
        local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        self._storages.append(local.untyped_storage())
        return tensor.clone()

    def overwrite(self) -> int:
        """Returns how many bytes they were."""
        for storage in self._storages:
            ctypes.memset(storage.data_ptr(), 255, storage.nbytes())  # NaN in every type
        num_bytes = sum(storage.nbytes() for storage in self._storages)
        self._storages.clear()
        return num_bytes
