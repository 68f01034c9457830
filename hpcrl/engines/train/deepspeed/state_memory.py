"""Move the tensors of the engine's state to other memory: temporarily to the host, or to files on a local disk.

DeepSpeed's tensors are views of a few large tensors. Tensors that share memory move together, and still share memory
afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from hpcrl.engines.train.deepspeed.zero import flat_weights
from hpcrl.engines.train.offloading import HostMemory


def move(tensors: Iterable[Tensor], copy: Callable[[UntypedStorage], UntypedStorage]) -> None:
    """Replace the tensors' memory by copies; the old memory is freed once nothing else refers to it."""
    copies: dict[int, UntypedStorage] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        old = tensor.untyped_storage()
        if old.nbytes():
            if old.data_ptr() not in copies:
                copies[old.data_ptr()] = copy(old)
            new = copies[old.data_ptr()]
            empty = torch.empty(0, dtype=tensor.dtype, device=new.device)
            tensor.data = empty.set_(new, tensor.storage_offset(), tensor.size(), tensor.stride())


def weight_tensors(module: nn.Module, zero: Any) -> Iterator[Tensor]:
    """Every tensor with compute weights. `zero` is DeepSpeed's optimizer, if any."""
    for parameter in module.parameters():
        yield getattr(parameter, "ds_tensor", parameter)  # with ZeRO-3: this rank's shard
        if mapping := getattr(parameter, "_hp_mapping", None):
            yield mapping.lp_fragment
    if (whole := getattr(zero, "lp_param_buffer", None)) is not None:
        yield whole
    for name in ("fp16_partitioned_groups_flat", "param_groups_fp16_flat_cpu_memory", "bit16_groups_flat"):
        yield from getattr(zero, name, ())
    yield from itertools.chain.from_iterable(getattr(zero, "parallel_partitioned_bit16_groups", ()))


def optimizer_tensors(module: nn.Module, zero: Any, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every tensor with fp32 weights or AdamW state, including tensors that are also compute weights."""
    yield from flat_weights(zero)
    for state in optimizer.state.values():
        yield from state.values()
    for parameter in module.parameters():
        if mapping := getattr(parameter, "_hp_mapping", None):
            yield mapping.hp_fragment
            yield from (mapping.optim_fragment or {}).values()


class HostOffload:
    """Moves the state on the device to host memory and back; gradient buffers are freed in between."""

    def __init__(
        self, module: nn.Module, zero: Any, optimizer: torch.optim.Optimizer | None, device: torch.device
    ) -> None:
        """`zero` is DeepSpeed's optimizer; None if DeepSpeed does not manage the model."""
        self._module, self._zero, self._optimizer, self._device = module, zero, optimizer, device
        self._host = HostMemory(device)
        self._away: dict[int, Tensor] = {}
        self._freed: list[tuple[Tensor, int]] = []

    def offload(self, weights: bool) -> None:
        """Move the state from the device to the host; with weights=False, compute weights stay."""
        if hasattr(self._zero, "empty_partition_cache"):
            self._zero.empty_partition_cache()  # parameters that ZeRO-3 keeps gathered
        of_computation = list(weight_tensors(self._module, self._zero))
        stays = set() if weights else {tensor.untyped_storage().data_ptr() for tensor in of_computation}
        state = self._optimizer and optimizer_tensors(self._module, self._zero, self._optimizer)
        here = {
            id(tensor): tensor
            for tensor in (*of_computation, *(state or ()))
            if self._is_here(tensor) and tensor.untyped_storage().data_ptr() not in stays
        }
        going = {key: tensor for key, tensor in here.items() if key not in self._away}
        self._move(going.values(), self._host.to_host)
        self._away |= going
        for buffer in self._gradient_buffers():
            if self._is_here(buffer) and (size := buffer.untyped_storage().nbytes()):
                self._freed.append((buffer, size))
                buffer.untyped_storage().resize_(0)

    def onload(self) -> None:
        """Move everything back."""
        self._move(self._away.values(), self._host.to_device)
        self._away = {}
        for buffer, size in self._freed:
            buffer.untyped_storage().resize_(size)
            buffer.zero_()
        self._freed = []

    def _move(self, tensors: Collection[Tensor], moved: Callable[[dict[int, Tensor]], dict[int, Tensor]]) -> None:
        """Move tensors with `moved`, a method of self._host. The key of each memory is its first tensor."""
        keys: dict[int, int] = {}
        memory: dict[int, Tensor] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in keys:
                keys[storage.data_ptr()] = id(tensor)
                memory[id(tensor)] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        copies = moved(memory)
        move(tensors, lambda storage: copies[keys[storage.data_ptr()]].untyped_storage())

    def _is_here(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device. Types are compared, since the device may be cuda without an index."""
        return tensor.device.type == self._device.type

    def _gradient_buffers(self) -> Iterator[Tensor]:
        """Buffers that ZeRO-3 keeps between two steps although their values are no longer needed."""
        if (gradients := getattr(self._zero, "grad_partitions_flat_buffer", None)) is not None:
            yield gradients
            yield from (bucket.buffer for bucket in self._zero.ipg_buckets.values() if bucket.buffer is not None)
