"""The process groups of a vLLM engine among a run's ranks.

vLLM's `external_launcher` creates its groups within the process's default group, and all ranks of the default group
take part. Here, the default group belongs to the trainer or the replica, and only some of its ranks may generate. So,
while an engine is created, vLLM's world is the replica, and only a group's members take part in its creation.
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
    """Arguments of EngineArgs for a replica of this many ranks. With custom_all_reduce, each rank sees all GPUs."""
    # In a process without a default group, `uni` creates one with only this rank.
    found = {
        "tensor_parallel_size": num_ranks,
        "distributed_executor_backend": "external_launcher" if dist.is_initialized() else "uni",
    }
    # vLLM's own all-reduce searches CUDA_VISIBLE_DEVICES for the other ranks' GPUs (CustomAllreduce, _can_p2p). If each
    # rank sees only its own GPU, vLLM would fail with an IndexError, so NCCL is used instead.
    return found | ({"disable_custom_all_reduce": not custom_all_reduce} if num_ranks > 1 else {})


@contextlib.contextmanager
def world_of(replica: ReplicaRanks) -> Iterator[None]:
    """Context in which vLLM creates an engine of these ranks. Collective within the replica. ValueError unless the
    default group consists of blocks of this many ranks, and the replica is one of them: vLLM numbers ranks so."""
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
        # On a CPU, the last part of the first item names shared memory. The last item is the rank's GPU, which is the
        # first one that it sees.
        return f"replica:{name}", own, 0

    with (
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(parallel_state, "init_world_group", init_world_group),
        mock.patch.object(ExecutorWithExternalLauncher, "_distributed_args", distributed_args),
    ):
        yield


@contextlib.contextmanager
def keeping_default_group() -> Iterator[None]:
    """Context in which vLLM shuts an engine down without destroying the default group, which is still needed."""
    destroy = dist.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    with mock.patch.object(dist, "destroy_process_group", destroy_process_group):
        yield


def _shared_name(replica: ReplicaRanks) -> str:
    """A name that only the replica's ranks have."""
    drawn = torch.tensor([secrets.randbits(62)])
    if replica.group is not None:
        replica.group.broadcast([drawn], dist.BroadcastOptions()).wait()
    return f"hpcrl{drawn.item():x}"
