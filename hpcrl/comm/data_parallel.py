"""Communication between an engine's ranks: rows within a data-parallel rank, sums across data-parallel ranks."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.messaging.world import World
from hpcrl.spec.division import Division


class DataParallel:
    """A rank's position in its engine's division. Built by all the engine's ranks together, after the default group."""

    def __init__(self, world: World, role: str, division: Division):
        group, data_parallel_peers = division.group_of(world.rank), division.data_parallel_peers(world.rank)
        self.is_head, self.holds_outputs = world.rank == group[0], world.rank in division.outputs
        self.num_data_parallel = len(division.groups)
        self._output = group.index(next(rank for rank in division.outputs if rank in group))
        self._across: Any = dist.group.WORLD
        self._inside: Any = None
        if division.is_split:
            self._across = world.group(
                f"{role}/across/{data_parallel_peers[0]}", data_parallel_peers, 0, of_engine=True
            )
            self._inside = world.group(f"{role}/inside/{group[0]}", group, 0, of_engine=True)

    def broadcast(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the leader's tensors, in host memory. Called by all ranks of a data-parallel rank that is split."""
        kinds = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()]
        header = torch.frombuffer(bytearray(msgspec.msgpack.encode(kinds)), dtype=torch.uint8)
        size = self._from(0, torch.tensor([len(header)]))
        header = self._from(0, header if self.is_head else torch.empty(int(size), dtype=torch.uint8))
        if not self.is_head:
            kinds = msgspec.msgpack.decode(header.numpy().tobytes(), type=list[tuple[str, str, tuple[int, ...]]])
            tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in kinds}
        for tensor in tensors.values():
            if tensor.numel():
                flat = tensor.contiguous().view(-1).view(torch.uint8)
                self._from(0, flat)
        return tensors

    def outputs(
        self, values: Tensor | None, num_tokens: int, width: int = 0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Broadcast `values`, [T] or with a width [T, width], from the rank that holds the outputs; other ranks may
        pass None. Called by all ranks of a data-parallel rank."""
        if self._inside is None or self.holds_outputs:
            assert values is not None, "this rank holds the outputs"
            given = values
        else:
            given = torch.empty((num_tokens, width) if width else num_tokens, dtype=dtype)
        return given if self._inside is None else self._from(self._output, given)

    def _from(self, root: int, tensor: Tensor) -> Tensor:
        """Broadcast the tensor from rank `root` of the group, in place on the other ranks."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._inside.broadcast([tensor], options).wait()
        return tensor

    def all_sum(self, tensor: Tensor) -> Tensor:
        """The sum over data-parallel ranks; called by all ranks of the engine."""
        total = tensor.clone()
        self._across.allreduce([total]).wait()
        return total

    def all_gather(self, own: Tensor) -> Tensor:
        """Concatenate the [n] values of all data-parallel ranks, where each rank has its own n. Called by all ranks of
        the engine."""
        counts = self._gathered(torch.tensor([len(own)]))
        longest = max(int(count) for count in counts)
        columns = self._gathered(torch.cat([own, own.new_zeros(longest - len(own))]))
        return torch.cat([column[: int(count)] for column, count in zip(columns, counts, strict=True)])

    def _gathered(self, own: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(own) for _ in range(self.num_data_parallel)]
        self._across.allgather([parts], [own]).wait()
        return parts
