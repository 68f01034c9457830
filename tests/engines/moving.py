"""Moves of an engine's state on a machine with one kind of memory: the source is overwritten after a move."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from hpcrl.engines.train import offloading


class Left:
    """Records memory from which tensors move, from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tensors: list[Tensor] = []
        copied = offloading.HostMemory._copied

        def noted(memory: offloading.HostMemory, pairs: Mapping[Any, tuple[Tensor, Tensor]]) -> dict[Any, Tensor]:
            done = copied(memory, pairs)
            self.note(*(tensor for tensor, _ in pairs.values()))
            return done

        monkeypatch.setattr(offloading.HostMemory, "_copied", noted)

    def note(self, *tensors: Tensor) -> None:
        """Record tensors that have moved."""
        self._tensors += [offloading._local(tensor) for tensor in tensors]

    def overwrite(self) -> int:
        """Overwrite the recorded memory; returns its bytes."""
        for tensor in self._tensors:
            assert tensor.is_contiguous()
            ctypes.memset(tensor.data_ptr(), 255, tensor.nbytes)  # NaN in every type
        num_bytes = sum(tensor.nbytes for tensor in self._tensors)
        self._tensors.clear()
        return num_bytes
