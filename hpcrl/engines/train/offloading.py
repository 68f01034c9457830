"""Move an engine's state to host memory and back (TrainEngine.offload). The host memory is kept and, with a GPU,
registered with CUDA, so copies have the bus's full rate. New memory would cost a page fault per 4 KiB, and unregistered
memory a second copy."""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import resource
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


class HostMemory:
    """Host memory for a device's tensors. Each key's memory is kept from its first use on."""

    def __init__(self, device: torch.device):
        self._device = device
        self._places: dict[Hashable, Tensor] = {}
        self._away: set[Hashable] = set()
        self._stay: set[Hashable] = set()  # tensors that were never on the device, such as an optimizer's counters

    def to_host(self, tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """Copy the tensors into this memory and wait for the copies, which are valid until the next call with the same
        keys. Tensors that are already on the host are returned unchanged. OSError without memory for a new key."""
        there = {key: tensor for key, tensor in tensors.items() if key not in self._away}
        going = {key: tensor for key, tensor in there.items() if tensor.device.type == self._device.type}
        self._stay |= there.keys() - going.keys()
        self._away |= going.keys()
        return {**tensors, **self._copied({key: (tensor, self._place(key, tensor)) for key, tensor in going.items()})}

    def to_device(self, tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """Copy the tensors to the device and wait for the copies. Tensors that belong on the host are not changed."""
        coming = {key: tensor for key, tensor in tensors.items() if self._is_away(key, tensor)}
        self._away -= coming.keys()
        new = {key: torch.empty_like(_local(tensor), device=self._device) for key, tensor in coming.items()}
        return {**tensors, **self._copied({key: (tensor, new[key]) for key, tensor in coming.items()})}

    def _is_away(self, key: Hashable, tensor: Tensor) -> bool:
        # The tensor may have been created on the host while the others were offloaded.
        return key in self._away or (tensor.device.type != self._device.type and key not in self._stay)

    def _place(self, key: Hashable, tensor: Tensor) -> Tensor:
        tensor, place = _local(tensor), self._places.get(key)
        if place is None or (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
            place = self._places[key] = _host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return place

    def _copied(self, pairs: Mapping[K, tuple[Tensor, Tensor]]) -> dict[K, Tensor]:
        for tensor, place in pairs.values():
            place.copy_(_local(tensor), non_blocking=True)
        if pairs:
            wait()
        return {key: _like(tensor, place) for key, (tensor, place) in pairs.items()}


def wait() -> None:
    """Wait for pending copies, in a process that uses a GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def register(memory: Tensor) -> Tensor:
    """Register host memory, to and from which CUDA then copies directly until the process ends. Where the driver
    refuses, copies are slower, which is logged once."""
    if torch.cuda.is_initialized():
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(error):
            _say_refused(str(error))
            with contextlib.suppress(RuntimeError):  # the next launch of a kernel would raise the same error
                torch.zeros(1, device="cuda")
    return memory


@functools.cache
def _say_refused(error: str) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
    text = "CUDA cannot register host memory (%s; ulimit -l is %s): copies to and from the host are slower"
    logger.warning(text, error, allowed)


def _host_memory(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], in separate pages, which registration needs."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    # Shared: a fork would move private pages away from the addresses registered with CUDA.
    return register(torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_SHARED), dtype=torch.uint8))


def _local(tensor: Tensor) -> Tensor:
    """A tensor's part on this rank."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(tensor: Tensor, local: Tensor) -> Tensor:
    """A tensor like `tensor`, but with this local part and on its device."""
    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local
