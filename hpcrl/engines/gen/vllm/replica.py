"""The process groups of a vLLM engine among the ranks of a run.

vLLM's `external_launcher` makes its groups within the process's default group, and all ranks of that take part. Here
the default group is the trainer's or the replica's, and only some of its ranks may generate. So while an engine is
made, vLLM's world is the replica, and a group is made by its own members alone.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hpcrl.engines.gen.generation_engine import ReplicaRanks


def arguments(num_ranks: int, custom_all_reduce: bool) -> dict[str, Any]:
    """Arguments of EngineArgs for a replica of this many ranks. custom_all_reduce: each sees the GPUs of all."""
    # In a process without a default group, `uni` makes one of this rank.
    found = {
        "tensor_parallel_size": num_ranks,
        "distributed_executor_backend": "external_launcher" if dist.is_initialized() else "uni",
    }
    # vLLM's own all-reduce asks CUDA_VISIBLE_DEVICES for the GPUs of the other ranks (CustomAllreduce, _can_p2p). Where
    # each rank sees its own GPU alone, vLLM would stop with an IndexError. NCCL takes its place.
    return found | ({"disable_custom_all_reduce": not custom_all_reduce} if num_ranks > 1 else {})


@contextlib.contextmanager
def world_of(replica: ReplicaRanks) -> Iterator[None]:
    """In which vLLM makes an engine of these ranks. Collective within the replica. ValueError if the ranks do not stand
    together in the default group as vLLM counts them."""
    if not dist.is_initialized():
        yield
        return
    from vllm.distributed import parallel_state
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    size, own = len(replica.ranks), dist.get_rank()
    first = own - replica.index
    if first % size or dist.get_world_size() % size:
        raise ValueError(
            f"layout.generator.tensor_parallel: the ranks {replica.ranks} of a replica begin at number {first} of the "
            f"{dist.get_world_size()} trainer or reference ranks; vLLM needs both to be multiples of {size}"
        )
    make_group, make_world = dist.new_group, parallel_state.init_world_group
    name, members = _shared_name(replica), list(range(first, first + size))

    def new_group(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and own not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return make_group(ranks, *args, **kwargs | {"use_local_synchronization": True})

    def init_world_group(ranks: Sequence[int], local_rank: int, backend: str) -> Any:
        return make_world(members, local_rank, backend)

    def distributed_args(executor: Any) -> tuple[str, int, int]:
        # The last word of the first names shared memory on a CPU; the first GPU that a rank sees is its own.
        return f"replica:{name}", own, 0

    with (
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(parallel_state, "init_world_group", init_world_group),
        mock.patch.object(ExecutorWithExternalLauncher, "_distributed_args", distributed_args),
    ):
        yield


@contextlib.contextmanager
def keeping_default_group() -> Iterator[None]:
    """In which vLLM ends an engine: it would destroy the default group as well, which others still need."""
    destroy = dist.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    with mock.patch.object(dist, "destroy_process_group", destroy_process_group):
        yield


def _shared_name(replica: ReplicaRanks) -> str:
    """A word that the ranks of the replica share with nobody else."""
    drawn = torch.tensor([secrets.randbits(62)])
    if replica.group is not None:
        replica.group.broadcast([drawn], dist.BroadcastOptions()).wait()
    return f"hpcrl{drawn.item():x}"
